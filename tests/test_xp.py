"""Python's numbers as a namespace: every result is what float32 and int32 arrays give."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import polyamp
from polyamp._xp import F32_MAX, F32_TINY, f32

host = polyamp.host
anything = st.floats(allow_nan=False)
singles = st.floats(width=32, allow_nan=False, allow_infinity=False)
int32s = st.integers(-(2**31), 2**31 - 1)


def single(value: float) -> float:
    with np.errstate(all="ignore"):
        return float(np.float32(value))


def test_the_ends_of_float32() -> None:
    info = np.finfo(np.float32)
    assert float(info.max) == F32_MAX == 3.4028234663852886e38
    assert float(info.tiny) == F32_TINY == 2.0**-126


@given(anything)
def test_rounding_is_numpys(value: float) -> None:
    assert f32(value) == single(value)
    assert host.c(value, "f32") == single(value)
    assert math.copysign(1, f32(value)) == math.copysign(1, value)


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (0.1, 0.10000000149011612),
        (16777217.0, 16777216.0),
        (16777219.0, 16777220.0),
        (3.4028235677973362e38, F32_MAX),
        (3.4028235677973366e38, math.inf),
        (-1e39, -math.inf),
        (1e-46, 0.0),
    ],
)
def test_rounding_known_values(value: float, rounded: float) -> None:
    assert f32(value) == rounded


def test_nan_stays_nan() -> None:
    assert math.isnan(f32(math.nan))
    assert not host.isfinite(math.nan)


@given(singles, singles)
def test_products_are_numpys(a: float, b: float) -> None:
    with np.errstate(all="ignore"):
        assert host.multiply(a, b) == float(np.float32(a) * np.float32(b))


def test_products_overflow_to_infinity() -> None:
    assert host.multiply(2.0**127, 2.0) == math.inf
    assert host.multiply(-(2.0**127), 2.0) == -math.inf
    assert host.multiply(2.0**-126, 0.5) == 2.0**-127


@given(singles)
def test_bits_are_numpys_and_come_back(value: float) -> None:
    pattern = host.bits(value)
    assert pattern == int(np.float32(value).view(np.int32))
    assert host.from_bits(pattern) == value


@given(int32s, st.integers(0, 31))
def test_shifts_are_numpys(value: int, count: int) -> None:
    assert host.left_shift(value, count) == int(np.left_shift(np.int32(value), np.int32(count)))
    assert host.right_shift(value, count) == int(np.right_shift(np.int32(value), np.int32(count)))


@given(int32s)
def test_integers_as_f32_are_numpys(value: int) -> None:
    assert host.as_f32(value) == float(np.int32(value).astype(np.float32))


@given(singles, singles)
def test_smaller_larger_and_where(a: float, b: float) -> None:
    assert host.minimum(a, b) == min(a, b)
    assert host.maximum(a, b) == max(a, b)
    assert host.where(True, a, b) == a
    assert host.where(False, a, b) == b
    assert host.isfinite(a) == bool(np.isfinite(a))


def test_constants_have_their_types() -> None:
    assert type(host.c(3, "f32")) is float
    assert type(host.c(3.0, "i32")) is int
    assert type(host.c(polyamp.Reason.FLOOR, "i32")) is int


def test_logic_is_on_bools() -> None:
    assert host.logical_not(True) is False
    assert host.logical_not(False) is True
    assert [host.logical_or(a, b) for a in (True, False) for b in (True, False)] == [
        True,
        True,
        True,
        False,
    ]
