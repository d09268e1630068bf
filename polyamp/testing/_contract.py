"""The tests every backend passes, ours and third parties'.

    import polyamp_mine
    from polyamp.testing import BackendContract

    class TestMine(BackendContract):
        backend = polyamp_mine

        def to_array(self, array):      # numpy array -> the framework's array
            return mine.asarray(array)

        def to_numpy(self, array):      # the framework's array -> numpy array
            return mine.to_numpy(array)

pytest collects the inherited tests. The expected values are the core's own on Python numbers, and
plain arithmetic.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

import polyamp
from polyamp._registry import _members

NAN, INF = float("nan"), float("inf")

RULES: tuple[polyamp.Rule, ...] = (
    polyamp.Dynamic(init_scale=2.0**10, growth_interval=4, growth_factor=1.5, backoff_factor=0.7),
    polyamp.Dynamic.like("nemo", init_scale=64.0, growth_interval=3, tolerance=0.25),
    polyamp.Dynamic.like("deepspeed-zero", init_scale=8.0, growth_interval=3),
    polyamp.Dynamic.like("metaseq", growth_interval=2, max_skips_in_a_row=3),
    polyamp.Static(512.0),
)
"""Rules that use every parameter between them."""


def same(got: Any, want: Any, what: str) -> None:
    """Raise AssertionError unless the two are equal; NaN equals nothing."""
    if not bool(got == want):
        raise AssertionError(f"{what}: got {got!r}, want {want!r}")


def events(seed: int, steps: int) -> list[bool]:
    """Whether each step is clean: growth stretches, single overflows and bursts."""
    dice = random.Random(seed)
    flags: list[bool] = []
    while len(flags) < steps:
        flags += [True] * dice.randrange(1, 12) + [False] * dice.choice([1, 1, 2, 4])
    return flags[:steps]


class BackendContract:
    """Tests of the `polyamp.Backend` protocol; see the module's docstring for how to use it.

    Attributes:
        backend: the module under test.
    """

    backend: Any

    def to_array(self, array: Any) -> Any:
        """A numpy array (any shape; float16, float32, int32 or bool) as the framework's array."""
        raise NotImplementedError("a contract needs to_array: numpy array -> backend array")

    def to_numpy(self, array: Any) -> Any:
        """The framework's array as a numpy array of the same dtype."""
        raise NotImplementedError("a contract needs to_numpy: backend array -> numpy array")

    # Members

    def test_has_every_member(self) -> None:
        missing = [name for name in _members() if not hasattr(self.backend, name)]
        same(missing, [], "members that the backend lacks")

    def test_name_and_devices(self) -> None:
        same(type(self.backend.NAME), str, "type of NAME")
        names = list(self.backend.devices())
        same({type(name) for name in names}, {str}, "types of the device names")

    # The array functions of a transition

    def test_constants_are_typed_scalars(self) -> None:
        c = self.backend.xp.c
        for value in (1.5, 2.0**-126, 3.4028234663852886e38, 0.1, 2):
            self._is(c(value, "f32"), polyamp.host.c(value, "f32"), "f32")
        for count in (0, -1, 3, 2.0, 2**31 - 1):
            self._is(c(count, "i32"), int(count), "i32")

    def test_operators_keep_dtypes(self) -> None:
        a, b = self._i(7), self._i(-3)
        self._is(a + b, 4, "i32")
        self._is(a - b, 10, "i32")
        self._is(a * b, -21, "i32")
        self._is(a // self._i(2), 3, "i32")
        self._is(a % self._i(4), 3, "i32")
        compared = [a > b, a >= a, b < a, a <= b, a == a]
        same([bool(x) for x in compared], [True, True, True, False, True], "> >= < <= ==")
        yes, no = self._flag(True), self._flag(False)
        same([bool(yes & no), bool(yes | no), bool(yes & yes)], [False, True, True], "& |")

    def test_where_is_not_harmed_by_the_other_branch(self) -> None:
        where, one = self.backend.xp.where, self._f(1.5)
        for bad in (NAN, INF, -INF):
            poison = self._f(bad)
            self._is(where(self._flag(True), one, poison), 1.5, "f32")
            self._is(where(self._flag(False), poison, one), 1.5, "f32")
        self._is(where(self._flag(False), self._i(1), self._i(2)), 2, "i32")

    def test_minimum_and_maximum(self) -> None:
        xp = self.backend.xp
        for a, b in ((1.0, 2.0), (2.0, 1.0), (1.0, 1.0), (INF, 3.0), (-1.0, 1.0)):
            self._is(xp.minimum(self._f(a), self._f(b)), min(a, b), "f32")
            self._is(xp.maximum(self._f(a), self._f(b)), max(a, b), "f32")
        self._is(xp.minimum(self._i(5), self._i(-5)), -5, "i32")
        self._is(xp.maximum(self._i(5), self._i(-5)), 5, "i32")

    def test_isfinite_and_logic(self) -> None:
        xp = self.backend.xp
        values = (0.0, -1.0, 3.4028234663852886e38, INF, -INF, NAN)
        found = [bool(xp.isfinite(self._f(v))) for v in values]
        same(found, [True, True, True, False, False, False], "isfinite")
        yes, no = self._flag(True), self._flag(False)
        same([bool(xp.logical_not(yes)), bool(xp.logical_not(no))], [False, True], "logical_not")
        pairs = [bool(xp.logical_or(a, b)) for a in (yes, no) for b in (yes, no)]
        same(pairs, [True, True, True, False], "logical_or")

    def test_multiply_rounds_to_f32(self) -> None:
        multiply = self.backend.xp.multiply
        for a, b in ((1.1, 1.1), (0.1, 0.7), (3.0e38, 0.3), (2.0**-126, 1.7), (16777217.0, 3.0)):
            want = polyamp.host.multiply(polyamp.host.c(a, "f32"), polyamp.host.c(b, "f32"))
            self._is(multiply(self._f(a), self._f(b)), want, "f32")
        self._is(multiply(self._f(2.0**127), self._f(2.0)), INF, "f32")

    def test_bits_and_shifts(self) -> None:
        xp = self.backend.xp
        known = {1.0: 0x3F800000, -2.5: -0x3FE00000, 2.0**-126: 0x00800000, INF: 0x7F800000}
        for value, pattern in known.items():
            self._is(xp.bits(self._f(value)), pattern, "i32")
            self._is(xp.from_bits(self._i(pattern)), value, "f32")
        self._is(xp.left_shift(self._i(3), self._i(23)), 3 << 23, "i32")
        self._is(xp.right_shift(self._i(-8), self._i(1)), -4, "i32")
        exponent = xp.right_shift(xp.bits(self._f(6.0)), self._i(23)) - self._i(127)
        self._is(exponent, 2, "i32")
        rebuilt = xp.from_bits(xp.left_shift(exponent + self._i(127), self._i(23)))
        self._is(rebuilt, 4.0, "f32")

    def test_integers_as_f32_ranges_and_largest(self) -> None:
        xp = self.backend.xp
        self._is(xp.as_f32(self._i(-7)), -7.0, "f32")
        self._is(xp.as_f32(self._i(16777217)), 16777216.0, "f32")
        row = self.to_numpy(xp.arange(4))
        same((row.tolist(), str(row.dtype)), ([0, 1, 2, 3], "int32"), "arange(4)")
        self._is(xp.max(xp.arange(4)), 3, "i32")

    # The transition

    def test_eager_transitions_equal_the_host(self) -> None:
        for rule in RULES:
            self._follows_host(rule, polyamp.bind(rule, self.backend.xp))

    def test_compiled_transitions_equal_the_host(self) -> None:
        for rule in RULES:
            step = polyamp.bind(rule, self.backend.xp)
            self._follows_host(rule, self.backend.compiled(step))

    # Inspecting, unscaling, selecting, casting

    def test_inspect_finds_one_bad_entry_anywhere(self) -> None:
        import numpy as np

        for shape in ((512, 512), (100_003,), (1,), ()):
            for bad in (NAN, INF, -INF):
                for place in (0, 0.5, 1):
                    grad = np.ones(shape, np.float32)
                    grad.flat[int(place * (grad.size - 1))] = bad
                    good = np.ones((3, 5), np.float32)
                    same(self._finite(good, grad), False, f"finite with {bad} in {shape}")
                    same(self._finite(grad, good), False, f"finite with {bad} in {shape}, first")
            same(self._finite(np.ones(shape, np.float32)), True, f"finite with ones in {shape}")

    def test_inspect_passes_over_what_is_not_there(self) -> None:
        import numpy as np

        nothing, one = np.zeros((0, 3), np.float32), np.ones(2, np.float32)
        for grads in ([], [None], [nothing], [None, nothing, one]):
            same(self._finite(*grads), True, f"finite of {len(grads)} good or absent gradients")
        same(self._finite(None, nothing, one * INF), False, "finite with inf beside absent ones")

    def test_inspect_needs_no_norm(self) -> None:
        import numpy as np

        large = np.array([3e38, -3e38], np.float32)
        same(self._finite(large, large), True, "finite of 3e38 four times (norm and sum overflow)")

    def test_inspect_judges_the_unscaled_value_in_f32(self) -> None:
        import numpy as np

        large = np.array([1e35, 0.0], np.float32)
        same(self._finite(large, scale=1.0), True, "finite of 1e35 at scale 1")
        same(self._finite(large, scale=1e-6), False, "finite of 1e35 at scale 1e-6")
        same(self._finite(-large, scale=1e-6), False, "finite of -1e35 at scale 1e-6")
        half, bad = np.array([60000.0], np.float16), np.array([INF], np.float16)
        same(self._finite(half, scale=2.0**-10), True, "finite of float16 60000 at scale 2**-10")
        same(self._finite(bad), False, "finite of a float16 inf")

    def test_inspect_measures_the_scaled_amax(self) -> None:
        import numpy as np

        first, second = np.array([1.0, -7.25], np.float32), np.array([[3.0]], np.float16)
        grads = self._arrays([first, None, second])
        signal = self.backend.inspect(grads, self._f(1024.0), amax=True)
        self._is(signal.amax, 7.25, "f32")
        same(bool(signal.finite), True, "finite beside amax")
        self._is(self.backend.inspect([], self._f(1.0), amax=True).amax, 0.0, "f32")

    def test_inspect_measures_the_underflow_share_or_says_unknown(self) -> None:
        import numpy as np

        grads = self._arrays([np.array([0.0, 1.0, 2.0**-15, -(2.0**-20), 2.0**-14], np.float32)])
        share = float(self.backend.inspect(grads, self._f(1.0), sub=True).sub)
        if share not in (0.5, -1.0):
            raise AssertionError(f"sub: got {share}, want 0.5 (2 of 4 nonzero), or -1 for unknown")

    def test_inspect_looks_at_the_loss(self) -> None:
        import numpy as np

        grads = self._arrays([np.ones(3, np.float32)])
        for value, fine in ((2.5, True), (NAN, False), (INF, False)):
            loss = self.to_array(np.array(value, np.float32))
            signal = self.backend.inspect(grads, self._f(8.0), loss=loss)
            found = (bool(signal.finite), bool(signal.loss_finite))
            same(found, (True, fine), f"finite, loss_finite with loss {value}")
        same(bool(self.backend.inspect(grads, self._f(8.0)).loss_finite), True, "with no loss")

    def test_unscale_is_exact_for_powers_of_two_and_wide_enough(self) -> None:
        import numpy as np

        true = np.array([0.1, -3.0, 1e-20, 7e20], np.float32)
        for power in (-20, 0, 16, 40):
            scaled = self.to_array(true * np.float32(2.0**power))
            (back,) = self.backend.unscale([scaled], self._f(2.0**-power))
            same(self.to_numpy(back).tolist(), true.tolist(), f"unscaled from 2**{power}")
        half = self.to_array(np.array([2.0**-10], np.float16))
        absent, small = self.backend.unscale([None, half], self._f(2.0**-16))
        same(absent, None, "an absent gradient, unscaled")
        same(float(self.to_numpy(small)[0]), 2.0**-26, "float16 2**-10 unscaled by 2**-16")
        same(float(self.to_numpy(half)[0]), 2.0**-10, "the argument of unscale afterwards")

    def test_select_never_multiplies(self) -> None:
        import numpy as np

        old = np.array([1.0, -0.0, INF, 2.0], np.float32)
        new = np.array([NAN, INF, -INF, 3.0], np.float32)
        counts = np.array([4, 5], np.int32)
        for flag, first in ((True, new), (False, old)):
            chosen, whole = self.backend.select(
                self._flag(flag), self._arrays([new, counts + 1]), self._arrays([old, counts])
            )
            same(self.to_numpy(chosen).tobytes(), first.tobytes(), f"select({flag}, ...)")
            same(self.to_numpy(whole).tolist(), [4 + flag, 5 + flag], f"select({flag}, integers)")

    def test_cast_touches_only_floating_arrays(self) -> None:
        import numpy as np

        values = np.array([1 / 3, 65504.0, 1e-7, -2.0], np.float32)
        others = [np.array([1, 2**30], np.int32), np.array([True, False])]
        half, *rest = self.backend.cast(self._arrays([values, *others]), "float16")
        same(str(self.to_numpy(half).dtype), "float16", "dtype after cast")
        same(self.to_numpy(half).tolist(), values.astype(np.float16).tolist(), "float16 values")
        for before, after in zip(others, map(self.to_numpy, rest), strict=True):
            same((after.tolist(), after.dtype), (before.tolist(), before.dtype), "not floating")
        close_to_one = self._arrays([np.array([1 + 2.0**-7, 1 + 2.0**-9], np.float32)])
        (back,) = self.backend.cast(self.backend.cast(close_to_one, "bfloat16"), "float32")
        same(self.to_numpy(back).tolist(), [1 + 2.0**-7, 1.0], "through bfloat16")

    def test_reduce_without_ranks_changes_nothing(self) -> None:
        for good in (True, False):
            signal = polyamp.Signal(self._flag(good), self._flag(True), self._f(2.5), self._f(0.25))
            agreed = self.backend.reduce(signal, None)
            found = (bool(agreed.finite), bool(agreed.loss_finite))
            same(found, (good, True), "reduced flags")
            same((float(agreed.amax), float(agreed.sub)), (2.5, 0.25), "reduced amax, sub")

    # One real training step

    def test_toy_step_unscales_with_the_scale_that_was_used(self) -> None:
        rule = polyamp.Dynamic(init_scale=1024.0, growth_interval=2)
        rows = self._train(rule, [0.5, 0.5, 0.5])
        same([w.tolist() for w, _ in rows], [[0.5, 1.5], [0.0, 1.0], [-0.5, 0.5]], "weights")
        same([s.loss_scale for _, s in rows], [1024.0, 2048.0, 2048.0], "scales")

    def test_toy_step_gives_the_update_of_training_without_scaling(self) -> None:
        batches = [0.1, 0.7, -0.3, 1e-3]
        plain = self._train(polyamp.Static(1.0), batches)
        scaled = self._train(polyamp.Dynamic(growth_interval=2), batches)
        for (want, _), (got, _) in zip(plain, scaled, strict=True):
            same(got.tobytes(), want.tobytes(), "weights with and without scaling")

    def test_toy_step_skips_as_if_the_batch_had_never_been_seen(self) -> None:
        rule = polyamp.Dynamic(growth_interval=2)
        for bad in (INF, NAN, 1e35):
            with_it = self._train(rule, [0.5, bad, 0.25])
            without = self._train(rule, [0.5, 0.25])
            same(with_it[1][0].tobytes(), with_it[0][0].tobytes(), f"weights after {bad}")
            same(with_it[2][0].tobytes(), without[1][0].tobytes(), f"weights later than {bad}")
            same(with_it[1][1][3:6], (2, 1, 1), f"step, skipped, in a row after {bad}")

    def test_toy_step_survives_any_number_of_overflows(self) -> None:
        import numpy as np

        rows = self._train(polyamp.Dynamic(), [INF] * 400 + [0.5])
        weights, state = rows[-1]
        same(rows[-2][0].tolist(), [1.0, 2.0], "weights after 400 overflows")
        same(bool(np.isfinite(weights).all()), True, "weights finite after one more, clean, step")
        same(state.loss_scale, 2.0**-126, "the scale then")

    def test_toy_step_decides_as_the_host(self) -> None:
        for rule in (RULES[0], RULES[1], RULES[4]):
            flags, state = events(seed=3, steps=40), rule.init()
            rows = self._train(rule, [0.5 if good else INF for good in flags])
            for good, (_, found) in zip(flags, rows, strict=True):
                state = polyamp.transition(rule, state, polyamp.Signal(good))
                lost = polyamp.Reason.LOSS_NOT_FINITE
                reasons = {state.reason} if good else {state.reason, lost}
                same(found.reason in reasons, True, f"reason {found.reason} among {reasons}")
                same(found._replace(reason=0), state._replace(reason=0), f"state under {rule}")

    def test_toy_step_goes_on_from_a_saved_state(self) -> None:
        rule = polyamp.Dynamic(init_scale=64.0, growth_interval=2, hysteresis=2)
        batches = [0.5, INF, 0.25, 0.125, INF, INF, 0.5, 0.25]
        whole = self._train(rule, batches)
        for k in range(1, len(batches)):
            weights, state = whole[k - 1]
            text = json.dumps(polyamp.state_to_dict(state))
            loaded = polyamp.state_from_dict(json.loads(text), rule)
            later = self._train(rule, batches[k:], weights, loaded)
            for (w, s), (w2, s2) in zip(whole[k:], later, strict=True):
                same((w2.tobytes(), s2), (w.tobytes(), s), f"continued after {k} steps")

    # Helpers

    def _f(self, value: float) -> Any:
        """An f32 scalar; by way of an array, since no rule has NaN or infinity for a constant."""
        import numpy as np

        return self.to_array(np.array(value, np.float32))

    def _i(self, value: int) -> Any:
        return self.backend.xp.c(value, "i32")

    def _flag(self, value: bool) -> Any:
        return self._i(int(value)) > self._i(0)

    def _is(self, got: Any, want: float, kind: str) -> None:
        array = self.to_numpy(got)
        dtype = {"f32": "float32", "i32": "int32"}[kind]
        found = (array.item() if array.shape == () else array, str(array.dtype))
        same(found, (want, dtype), "value and dtype of a scalar")

    def _arrays(self, arrays: Iterable[Any]) -> list[Any]:
        return [None if a is None else self.to_array(a) for a in arrays]

    def _finite(self, *grads: Any, scale: float = 1.0) -> bool:
        return bool(self.backend.inspect(self._arrays(grads), self._f(scale)).finite)

    def _follows_host(self, rule: polyamp.Rule, step: Any) -> None:
        state, want = rule.init(self.backend.xp), rule.init()
        for good in events(seed=0, steps=60):
            state = step(state, polyamp.Signal(self._flag(good)))
            want = polyamp.transition(rule, want, polyamp.Signal(good))
            self._is(state.loss_scale, want.loss_scale, "f32")
            counts = [*zip(state[1:-1], want[1:-1], strict=True)]
            for got, right in [*counts, *zip(state.memory, want.memory, strict=True)]:
                self._is(got, right, "i32")

    def _train(
        self,
        rule: polyamp.Rule,
        batches: Sequence[float],
        weights: Any = None,
        state: polyamp.ScalerState | None = None,
    ) -> list[tuple[Any, polyamp.ScalerState]]:
        """Weights [1, 2] trained on batches of one value; (weights, state) after each step."""
        import numpy as np

        weights = np.array([1.0, 2.0], np.float32) if weights is None else weights
        rows = []
        for value in batches:
            batch, before = np.full(2, value, np.float32), weights.copy()
            after, state = self.backend.toy_step(weights, batch, rule, state)
            same(weights.tobytes(), before.tobytes(), "the weights passed to toy_step, afterwards")
            weights = np.asarray(after)
            rows.append((weights, state))
        return rows
