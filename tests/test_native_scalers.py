"""How the native scalers differ, by running them: the table in docs/scaling.md, line by line."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

import polyamp


class Torch:
    """torch.amp.GradScaler on the CPU, with one parameter and SGD of learning rate 1."""

    def __init__(self, **options: Any) -> None:
        self.torch = pytest.importorskip("torch", reason="runs torch.amp.GradScaler")
        self.scaler = self.torch.amp.GradScaler("cpu", **options)
        self.weight = self.torch.nn.Parameter(self.torch.zeros(1))
        self.optimizer = self.torch.optim.SGD([self.weight], lr=1.0)

    def step(self, scaled_gradient: float) -> float:
        """One step; returns the scale after it."""
        self.scaler.scale(self.weight.detach())
        self.weight.grad = self.torch.tensor([scaled_gradient])
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale()


class TestTorch:
    def test_grows_after_the_interval(self):
        native = Torch(init_scale=4.0, growth_interval=3)
        assert [native.step(1.0) for _ in range(4)] == [4.0, 4.0, 8.0, 8.0]

    def test_an_interval_lowered_below_the_count_never_grows(self):
        native = Torch(init_scale=4.0, growth_interval=5)
        for _ in range(3):
            native.step(1.0)
        native.scaler.set_growth_interval(2)
        assert {native.step(1.0) for _ in range(20)} == {4.0}

    def test_no_floor_and_at_zero_the_parameters_become_nan(self):
        native = Torch()
        scales = [native.step(math.inf) for _ in range(166)]
        assert scales[164] == 2.0**-149
        assert scales[165] == 0.0
        assert native.step(0.0) == 0.0  # what a loss times 0 gives
        assert math.isnan(native.weight.item())

    def test_the_scale_that_would_be_infinite_is_left(self):
        native = Torch(init_scale=2.0**126, growth_interval=1)
        assert [native.step(1.0) for _ in range(3)] == [2.0**127] * 3

    def test_a_gradient_infinite_after_unscaling_is_applied(self):
        native = Torch(init_scale=1e-6)
        native.step(1e35)
        assert native.weight.item() == -math.inf

    def test_the_scale_of_the_first_step_is_float32(self):
        native = Torch(init_scale=2.0**17)
        loss = native.torch.tensor(1.0, dtype=native.torch.float16)
        scaled = native.scaler.scale(loss)
        assert scaled.dtype == native.torch.float32
        assert scaled.item() == 2.0**17

    def test_it_skips_by_itself(self):
        native = Torch()
        native.step(math.inf)
        assert native.weight.item() == 0.0

    def test_the_scale_in_use_unscales_the_step_of_growth(self):
        native = Torch(init_scale=4.0, growth_interval=1)
        assert native.step(4.0) == 8.0
        assert native.weight.item() == -1.0


KERAS = """
import json
import keras
import numpy as np

FACTS = {}


class Native:
    def __init__(self, **options):
        self.weight = keras.Variable([0.0])
        inner = keras.optimizers.SGD(1.0)
        self.scaler = keras.optimizers.LossScaleOptimizer(inner, **options)

    def step(self, gradient):
        self.scaler.apply([keras.ops.convert_to_tensor([gradient], "float32")], [self.weight])
        return float(self.scaler.dynamic_scale)

    def value(self):
        return float(np.asarray(self.weight)[0])


one = Native(initial_scale=4.0, dynamic_growth_steps=3)
FACTS["growth"] = [one.step(1.0) for _ in range(4)]
one = Native(initial_scale=4.0, dynamic_growth_steps=5)
for _ in range(3):
    one.step(1.0)
one.scaler.dynamic_growth_steps = 2
FACTS["lowered"] = sorted({one.step(1.0) for _ in range(20)})
one = Native(initial_scale=2.0**-148)
FACTS["collapse"] = [one.step(float("inf")) for _ in range(2)]
one.step(0.0)
FACTS["after collapse"] = repr(one.value())
one = Native(initial_scale=2.0**126, dynamic_growth_steps=1)
FACTS["ceiling"] = [repr(one.step(1.0)) for _ in range(2)]
one = Native(initial_scale=1e-6)
one.step(1e35)
FACTS["unscaled overflow"] = repr(one.value())
one = Native(initial_scale=2.0**17)
loss = keras.ops.convert_to_tensor(1.0, "float16")
first = one.scaler.scale_loss(loss)
one.step(1.0)
second = one.scaler.scale_loss(loss)
FACTS["float16"] = [[str(keras.backend.standardize_dtype(x.dtype)), repr(float(x))]
                    for x in (first, second)]
one = Native(initial_scale=4.0, dynamic_growth_steps=1)
FACTS["growth step"] = [one.step(4.0), one.value()]
one = Native(initial_scale=4.0)
one.step(float("inf"))
FACTS["skip"] = one.value()
print(json.dumps(FACTS))
"""


@cache
def keras_facts() -> dict[str, Any]:
    """What keras.optimizers.LossScaleOptimizer does on PyTorch, in a process of its own."""
    for name in ("keras", "torch"):
        pytest.importorskip(name, reason="runs keras.optimizers.LossScaleOptimizer on PyTorch")
    environment = {**os.environ, "KERAS_BACKEND": "torch", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", KERAS], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("growth", [4.0, 4.0, 8.0, 8.0]),
        ("lowered", [4.0]),
        ("collapse", [2.0**-149, 0.0]),
        ("after collapse", "nan"),
        ("ceiling", ["1.7014118346046923e+38", "inf"]),
        ("unscaled overflow", "-inf"),
        ("float16", [["float32", "131072.0"]] * 2),
        ("growth step", [8.0, -1.0]),
        ("skip", 0.0),
    ],
)
def test_keras(fact, value):
    assert keras_facts()[fact] == value


class Flax:
    """flax.training.dynamic_scale.DynamicScale with the gradient of factor * w."""

    def __init__(self, **options: Any) -> None:
        dynamic_scale = pytest.importorskip(
            "flax.training.dynamic_scale", reason="runs flax's DynamicScale"
        )
        self.state = dynamic_scale.DynamicScale(**options)

    def step(self, factor: float, weight: Any = None) -> tuple[bool, float, Any]:
        """One step; (finite, scale after it, unscaled gradient)."""
        import jax.numpy as jnp

        weight = jnp.float32(1.0) if weight is None else weight
        result = self.state.value_and_grad(lambda w: w * factor)(weight)
        self.state, finite, _, gradient = result
        return bool(finite), float(self.state.scale), gradient


class TestFlax:
    def test_grows_one_step_late(self):
        native = Flax(scale=4.0, growth_interval=3)
        assert [native.step(1.0)[1] for _ in range(5)] == [4.0, 4.0, 4.0, 8.0, 8.0]

    def test_an_interval_lowered_below_the_count_never_grows(self):
        native = Flax(scale=4.0, growth_interval=5)
        for _ in range(4):
            native.step(1.0)
        native.state = native.state.replace(growth_interval=2)
        assert {native.step(1.0)[1] for _ in range(20)} == {4.0}

    def test_its_floor(self):
        native = Flax(scale=2.0**-125)
        assert [native.step(math.inf)[1] for _ in range(3)] == [2.0**-126] * 3

    def test_at_the_ceiling_the_scale_is_no_power_of_two(self):
        native = Flax(scale=2.0**127, growth_interval=0)
        assert native.step(1e-30)[1] == float.fromhex("0x1.fffffep127")

    def test_a_gradient_infinite_after_unscaling_is_an_overflow(self):
        import jax.numpy as jnp

        native = Flax(scale=1e-6)
        state, finite, _, gradient = native.state.value_and_grad(lambda w: (w * 1e21) * 1e20)(
            jnp.float32(1e-12)
        )
        assert 1e-6 * 1e21 * 1e20 < 3e38
        assert (bool(finite), float(gradient)) == (False, math.inf)
        assert float(state.scale) == pytest.approx(5e-7)

    def test_the_first_scale_is_cast_to_a_float16_loss(self):
        import jax.numpy as jnp

        native = Flax()
        assert native.step(2.0**-14, jnp.float16(1.0))[:2] == (False, 32768.0)
        assert native.step(2.0**-14, jnp.float16(1.0))[:2] == (True, 32768.0)

    def test_it_leaves_the_skip_to_its_caller(self):
        finite, _, gradient = Flax().step(math.inf)
        assert not finite
        assert not math.isfinite(float(gradient))


class TestJmp:
    def native(self, scale: float, **options: Any) -> Any:
        self.jmp = pytest.importorskip("jmp", reason="runs jmp.DynamicLossScale")
        import jax.numpy as jnp

        return self.jmp.DynamicLossScale(jnp.float32(scale), **options)

    def steps(self, state: Any, finite: bool, count: int) -> list[float]:
        import jax.numpy as jnp

        scales = []
        for _ in range(count):
            state = state.adjust(jnp.asarray(finite))
            scales.append(float(state.loss_scale))
        self.last = state
        return scales

    def test_grows_after_the_period(self):
        assert self.steps(self.native(4.0, period=3), True, 4) == [4.0, 4.0, 8.0, 8.0]

    def test_a_period_lowered_below_the_count_grows_late(self):
        import dataclasses

        self.steps(self.native(4.0, period=8), True, 5)
        lowered = dataclasses.replace(self.last, period=3)
        assert self.steps(lowered, True, 5) == [4.0, 4.0, 4.0, 8.0, 8.0]

    def test_its_floor_is_1(self):
        assert self.steps(self.native(2.0), False, 3) == [1.0] * 3

    def test_another_floor_is_lost_in_jit(self):
        import jax
        import jax.numpy as jnp

        state = self.native(1.0, min_loss_scale=jnp.float32(0.25))
        assert self.steps(state, False, 3) == [0.5, 0.25, 0.25]
        through = jax.jit(lambda s: s)(state)
        assert self.steps(through, False, 3) == [1.0] * 3

    def test_the_scale_that_would_be_infinite_is_left(self):
        assert self.steps(self.native(2.0**127, period=1), True, 2) == [2.0**127] * 2

    def test_the_scale_of_the_first_step_is_float32(self):
        import jax.numpy as jnp

        scaled = self.native(2.0**17).scale(jnp.float16(1.0))
        assert scaled.dtype == jnp.float32
        assert float(scaled) == 2.0**17


class TestPolyamp:
    """The column of polyamp's own."""

    def run(self, rule: polyamp.Rule, finite: bool, count: int, state: Any = None) -> list[float]:
        state = rule.init() if state is None else state
        scales = []
        for _ in range(count):
            state = polyamp.transition(rule, state, polyamp.Signal(finite))
            scales.append(state.loss_scale)
        self.last = state
        return scales

    def test_grows_after_the_interval(self):
        rule = polyamp.Dynamic(init_scale=4.0, growth_interval=3)
        assert self.run(rule, True, 4) == [4.0, 4.0, 8.0, 8.0]

    def test_an_interval_lowered_below_the_count_grows_at_once(self):
        self.run(polyamp.Dynamic(init_scale=4.0, growth_interval=5), True, 3)
        lowered = polyamp.Dynamic(init_scale=4.0, growth_interval=2)
        assert self.run(lowered, True, 1, self.last) == [8.0]

    def test_its_floor_and_ceiling(self):
        assert self.run(polyamp.Dynamic(), False, 400)[-1] == 2.0**-126
        assert self.run(polyamp.Dynamic(growth_interval=1), True, 400)[-1] == 2.0**126
