"""What the checks of a backend have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

NAN, INF = float("nan"), float("inf")


def same(got: Any, want: Any, what: str) -> None:
    """Raise AssertionError unless the two are equal; NaN equals nothing."""
    if not bool(got == want):
        raise AssertionError(f"{what}: got {got!r}, want {want!r}")


class Checks:
    """Base of the checks.

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
