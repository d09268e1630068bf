"""The real scalers of installed libraries judge what is imported from them and written for them."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
from test_foreign_continuation import quiet, scales_here

import polyamp

RANDOM = random.Random(11)
TRACES = [[int(RANDOM.random() < share) for _ in range(14)] for share in (0.15, 0.5)]


class Torch:
    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        torch = pytest.importorskip("torch")
        self.parameter = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        if saved is not None:
            self.scaler.load_state_dict(saved)
        self.scaler.scale(torch.zeros(1))

    def step(self, overflow: bool) -> float:
        import torch

        self.parameter.grad = torch.full((1,), float("inf") if overflow else 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return float(self.scaler.get_scale())

    def save(self) -> Any:
        return self.scaler.state_dict()


class Flax:
    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        module = pytest.importorskip("flax.training.dynamic_scale")
        kept = saved or {"scale": 256.0, "growth_interval": 3, "minimum_scale": 16.0}
        self.scaler = module.DynamicScale(**kept)

    def step(self, overflow: bool) -> float:
        import jax.numpy as jnp

        gradient = jnp.float32(np.inf if overflow else 1.0)
        self.scaler = self.scaler.value_and_grad(lambda x: x * gradient)(jnp.float32(1.0))[0]
        return float(self.scaler.scale)

    def save(self) -> Any:
        return self.scaler


class Jmp:
    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        jmp = pytest.importorskip("jmp")
        import jax.numpy as jnp

        kept = saved or {"loss_scale": 256.0, "period": 3, "min_loss_scale": 16.0}
        kept = {k: jnp.float32(v) if k.endswith("scale") else v for k, v in kept.items()}
        kept["counter"] = jnp.int32(kept.get("counter", 0))
        self.scaler = jmp.DynamicLossScale(**kept)

    def step(self, overflow: bool) -> float:
        import jax.numpy as jnp

        self.scaler = self.scaler.adjust(jnp.array(not overflow))
        return float(self.scaler.loss_scale)

    def save(self) -> Any:
        return self.scaler


class Keras:
    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        keras = pytest.importorskip("keras")
        kept = saved or {"initial_scale": 256.0, "dynamic_growth_steps": 3}
        setup = {k: kept[k] for k in ("initial_scale", "dynamic_growth_steps")}
        self.scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), **setup)
        self.variable = keras.Variable(np.zeros(1, np.float32))
        self.scaler.build([self.variable])
        for name in ("dynamic_scale", "step_counter"):
            if name in kept:
                getattr(self.scaler, name).assign(kept[name])

    def step(self, overflow: bool) -> float:
        from keras import ops

        self.scaler.apply([ops.full((1,), float("inf") if overflow else 1.0)], [self.variable])
        return float(self.scaler.dynamic_scale.value)

    def save(self) -> Any:
        return self.scaler


@pytest.mark.parametrize("kind", [Torch, Flax, Jmp, Keras], ids=lambda k: k.__name__)
@pytest.mark.parametrize("trace", TRACES, ids=["few", "many"])
def test_both_ways_at_every_prefix(kind: Any, trace: list[int]) -> None:
    native = kind()
    whole = [native.step(bool(bad)) for bad in trace]
    native, seen = kind(), []
    for cut, bad in enumerate([*trace, 0]):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rule, state = polyamp.import_scaler(native.save())
        assert scales_here(rule, state, trace[cut:]) == whole[cut:], cut
        written = polyamp.export_scaler(rule, state, kind.__name__.lower())
        if cut % 5 == 0:
            again = kind(written)
            assert [again.step(bool(b)) for b in trace[cut:]] == whole[cut:], cut
        if cut < len(trace):
            seen.append(native.step(bool(bad)))
    assert seen == whole


def test_a_float16_scale_of_jmp_never_passes_float16() -> None:
    jmp = pytest.importorskip("jmp")
    import jax.numpy as jnp

    scaler = jmp.DynamicLossScale(jnp.float16(2.0**13), period=2, min_loss_scale=jnp.float16(1.0))
    rule, state = polyamp.import_scaler(scaler)
    seen = []
    for _ in range(12):
        scaler = scaler.adjust(jnp.array(True))
        seen.append(float(scaler.loss_scale))
    assert seen[-1] == 2.0**15
    assert scales_here(rule, state, [0] * 12) == seen


def test_a_fixed_scale_of_jmp_and_of_torch() -> None:
    jmp = pytest.importorskip("jmp")
    rule, state = polyamp.import_scaler(jmp.StaticLossScale(np.float32(128.0)), "jmp")
    assert (rule, state.loss_scale) == (polyamp.Static(128.0), 128.0)
    native = Torch(polyamp.export_scaler(rule, state, "torch"))
    assert [native.step(bool(bad)) for bad in (0, 1, 0, 1, 1)] == [128.0] * 5
    assert polyamp.import_scaler(native.save())[0] == polyamp.Static(128.0)


def test_polyamp_s_own_scaler_objects() -> None:
    torch = pytest.importorskip("polyamp_torch")
    rule = polyamp.Dynamic.like("metaseq", init_scale=64.0)
    scaler = torch.GradScaler("cpu", rule=rule)
    for source in (scaler, scaler.state_dict(), scaler.to_dict()):
        assert polyamp.import_scaler(source) == (rule, rule.init())
        assert polyamp.import_scaler({"model": {}, "scaler": source}) == (rule, rule.init())


def test_polyamp_s_dynamic_scale_brings_its_rule() -> None:
    jax = pytest.importorskip("polyamp_jax")
    scaler = jax.DynamicScale(rule="megatron")
    for bad in (0, 1, 0):
        scaler = scaler.value_and_grad(lambda x, bad=bad: x * (np.inf if bad else 1.0))(1.0)[0]
    rule, state = polyamp.import_scaler(scaler)
    assert rule == polyamp.Dynamic.like("megatron")
    assert (state.loss_scale, state.clean, state.left, state.skipped) == (2.0**32, 1, 1, 1)
    plain = polyamp.import_scaler(jax.DynamicScale(growth_interval=5))
    assert plain[0] == polyamp.Dynamic.like("flax", growth_interval=5)


def test_a_whole_run_moves_from_torch_to_flax() -> None:
    """10 steps in torch, 10 in flax, 10 in Keras: the trace of 30 in any one."""
    trace = [0, 0, 0, 1, 0, 0, 0, 0, 1, 1] * 3
    seen: list[float] = []
    saved = polyamp.scaler_to_dict(
        rule := polyamp.Dynamic.like("torch", init_scale=256.0, growth_interval=3), rule.init()
    )
    for turn, kind in enumerate((Torch, Flax, Keras)):
        written = quiet(
            polyamp.export_scaler, *polyamp.scaler_from_dict(saved), kind.__name__.lower()
        )
        native = kind(written)
        seen += [native.step(bool(bad)) for bad in trace[10 * turn : 10 * turn + 10]]
        saved = polyamp.scaler_to_dict(*polyamp.import_scaler(native.save()))
    assert seen == scales_here(rule, rule.init(), trace)
