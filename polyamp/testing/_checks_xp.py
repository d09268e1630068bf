"""Checks of the array functions of a transition."""

from __future__ import annotations

from polyamp._xp import host
from polyamp.testing._checks import INF, NAN, Checks, same


class NamespaceChecks(Checks):
    """`backend.xp`: typed constants, operators, select, bits."""

    def test_constants_are_typed_scalars(self) -> None:
        c = self.backend.xp.c
        for value in (1.5, 2.0**-126, 3.4028234663852886e38, 0.1, 2):
            self._is(c(value, "f32"), host.c(value, "f32"), "f32")
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
            want = host.multiply(host.c(a, "f32"), host.c(b, "f32"))
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

    def test_integers_as_f32(self) -> None:
        xp = self.backend.xp
        self._is(xp.as_f32(self._i(-7)), -7.0, "f32")
        self._is(xp.as_f32(self._i(16777217)), 16777216.0, "f32")
