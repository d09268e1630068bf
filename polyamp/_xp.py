"""The few array functions a transition needs, and their version for plain Python numbers.

A framework joins by giving these names (a module or an object, see `Namespace`). Python numbers
are the reference: every constant and product is rounded to float32, so that the host computes the
same bits as float32 arrays do.
"""

from __future__ import annotations

import math
import struct
from typing import Any, Literal, Protocol

Kind = Literal["f32", "i32"]

_F32 = struct.Struct("<f")
_I32 = struct.Struct("<i")

F32_MAX = _F32.unpack(b"\xff\xff\x7f\x7f")[0]
"""Largest finite float32."""
F32_TINY = 2.0**-126
"""Smallest normal float32. Smaller values are flushed to zero by XLA, so no scale goes below."""


def f32(value: float) -> float:
    """`value` rounded to the nearest float32 (ties to even, out of range to infinity)."""
    try:
        return float(_F32.unpack(_F32.pack(value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


class Namespace(Protocol):
    """Array functions over 0-d values (f32, i32, bool) of one framework on one device.

    `+`, `-`, `%`, `//`, comparisons, `&` and `|` are used as operators; what differs between
    frameworks is here. Arguments are f32, i32 or bool scalars of the framework; results have the
    dtype of their arguments unless said otherwise.
    """

    def c(self, value: float, kind: Kind, /) -> Any:
        """A typed constant: float32 or int32."""

    def where(self, condition: Any, yes: Any, no: Any, /) -> Any:
        """`yes` where `condition`, else `no`; NaN and infinity in the other branch do no harm."""

    def minimum(self, a: Any, b: Any, /) -> Any:
        """The smaller."""

    def maximum(self, a: Any, b: Any, /) -> Any:
        """The larger."""

    def isfinite(self, a: Any, /) -> Any:
        """bool: neither infinite nor NaN."""

    def logical_not(self, a: Any, /) -> Any:
        """bool negation (`~` is wrong on Python's bool)."""

    def logical_or(self, a: Any, b: Any, /) -> Any:
        """bool disjunction."""

    def multiply(self, a: Any, b: Any, /) -> Any:
        """f32 product, rounded to float32, infinite on overflow."""

    def bits(self, a: Any, /) -> Any:
        """The bits of an f32 as i32."""

    def from_bits(self, a: Any, /) -> Any:
        """The f32 whose bits an i32 holds."""

    def left_shift(self, a: Any, count: Any, /) -> Any:
        """i32 shift to the left."""

    def right_shift(self, a: Any, count: Any, /) -> Any:
        """i32 arithmetic shift to the right."""

    def as_f32(self, a: Any, /) -> Any:
        """An i32 as f32."""


class _Host:
    """`Namespace` for Python's own float, int and bool."""

    def c(self, value: float, kind: Kind) -> float | int:
        return f32(value) if kind == "f32" else int(value)

    def where(self, condition: bool, yes: Any, no: Any) -> Any:
        return yes if condition else no

    def minimum(self, a: Any, b: Any) -> Any:
        return b if b < a else a

    def maximum(self, a: Any, b: Any) -> Any:
        return b if b > a else a

    def isfinite(self, a: float) -> bool:
        return math.isfinite(a)

    def logical_not(self, a: bool) -> bool:
        return not a

    def logical_or(self, a: bool, b: bool) -> bool:
        return a or b

    def multiply(self, a: float, b: float) -> float:
        return f32(a * b)

    def bits(self, a: float) -> int:
        return int(_I32.unpack(_F32.pack(a))[0])

    def from_bits(self, a: int) -> float:
        return float(_F32.unpack(_I32.pack(a))[0])

    def left_shift(self, a: int, count: int) -> int:
        return ((a << count) + 2**31) % 2**32 - 2**31

    def right_shift(self, a: int, count: int) -> int:
        return a >> count

    def as_f32(self, a: int) -> float:
        return f32(float(a))


host: Namespace = _Host()
"""The namespace of plain Python numbers."""
