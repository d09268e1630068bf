"""Checks of inspecting, unscaling, selecting, casting and reducing."""

from __future__ import annotations

import polyamp
from polyamp.testing._checks import INF, NAN, Checks, same


class ArrayChecks(Checks):
    """`inspect`, `unscale`, `select`, `cast` and `reduce` of a backend."""

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
