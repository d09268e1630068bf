"""Number formats against ml_dtypes, numpy and every bit pattern of the small formats."""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyamp._errors import PolicyError
from polyamp._formats import FORMATS, Format, format_of, formats_table

STORED = sorted(set(FORMATS) - {"tfloat32"})
SMALL = [name for name in STORED if FORMATS[name].bits <= 16]


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def test_the_seven_formats_are_there():
    assert set(FORMATS) == {
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "tfloat32",
        "float8_e4m3fn",
        "float8_e5m2",
    }
    assert all(f.name == name for name, f in FORMATS.items())


@pytest.mark.parametrize("name", STORED)
def test_numbers_equal_finfo(name):
    info, ours = ml_dtypes.finfo(numpy_dtype(name)), FORMATS[name]
    assert ours.max == float(info.max)
    assert ours.smallest_normal == float(info.smallest_normal)
    assert ours.smallest_subnormal == float(info.smallest_subnormal)
    assert ours.epsilon == float(info.eps)
    assert ours.bits == ours.storage_bits == info.bits
    assert (ours.exponent_bits, ours.mantissa_bits) == (info.nexp, info.nmant)


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_numbers_equal_numpy_finfo(name):
    info, ours = np.finfo(name), FORMATS[name]
    assert ours.max == float(info.max)
    assert ours.smallest_normal == float(info.smallest_normal)
    assert ours.smallest_subnormal == float(info.smallest_subnormal)
    assert ours.epsilon == float(info.eps)
    assert ours.bias == info.maxexp - 1


@pytest.mark.parametrize("name", SMALL)
def test_numbers_equal_those_found_among_all_bit_patterns(name):
    ours = FORMATS[name]
    codes = np.arange(2**ours.bits, dtype=np.uint16 if ours.bits == 16 else np.uint8)
    with np.errstate(invalid="ignore"):
        values = codes.view(numpy_dtype(name)).astype(np.float64)
    finite = values[np.isfinite(values)]
    assert ours.max == finite.max()
    assert ours.smallest_subnormal == finite[finite > 0].min()
    above_one = finite[finite > 1].min()
    assert ours.epsilon == above_one - 1
    field = (codes >> ours.mantissa_bits) & (2**ours.exponent_bits - 1)
    assert ours.smallest_normal == values[(field == 1) & (values > 0)].min()


def test_tfloat32_is_float32_with_thirteen_mantissa_bits_less():
    ours, f32 = FORMATS["tfloat32"], FORMATS["float32"]
    largest = np.array(0x7F7FE000, np.uint32).view(np.float32)
    assert ours.max == float(largest)
    assert (ours.bits, ours.storage_bits) == (19, 32)
    assert ours.smallest_normal == f32.smallest_normal == 2.0**-126
    assert ours.epsilon == FORMATS["float16"].epsilon == 2.0**-10
    assert ours.smallest_subnormal == 2.0**-136


def test_known_numbers():
    assert FORMATS["float16"].max == 65504.0
    assert FORMATS["float8_e4m3fn"].max == 448.0
    assert FORMATS["float8_e5m2"].max == 57344.0
    assert FORMATS["float64"].smallest_subnormal == 5e-324


@given(exponent=st.integers(2, 11), mantissa=st.integers(1, 52), reserved=st.booleans())
def test_every_layout_gives_ordered_positive_finite_numbers(exponent, mantissa, reserved):
    if exponent == 11:
        reserved = True
    f = Format("x", 1 + exponent + mantissa, exponent, mantissa, reserved)
    assert 0 < f.smallest_subnormal <= f.smallest_normal <= f.max
    assert math.isfinite(f.max)
    assert f.smallest_subnormal == f.smallest_normal * f.epsilon
    assert f.storage_bits >= max(8, f.bits)


def test_a_layout_that_does_not_add_up_is_refused():
    with pytest.raises(PolicyError, match="not 17 bits"):
        Format("x", 17, 5, 10)
    with pytest.raises(PolicyError, match="at least 2 exponent bits"):
        Format("x", 4, 1, 2)


def test_formats_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FORMATS["float16"].bits = 8
    with pytest.raises(TypeError):
        FORMATS["float16"] = FORMATS["float32"]


ALIASES = {
    "float16": ["fp16", "half", "f16", " FP16 ", "torch.float16", "torch.half", "np.float16"],
    "bfloat16": ["bf16", "BF16", "torch.bfloat16", "jnp.bfloat16", "ml_dtypes.bfloat16"],
    "float32": ["fp32", "f32", "float", "full", "single", "tf.float32"],
    "float64": ["fp64", "f64", "double", "numpy.float64"],
    "tfloat32": ["tf32", "TF32"],
    "float8_e4m3fn": ["fp8_e4m3", "fp8_e4m3fn", "f8e4m3fn", "torch.float8_e4m3fn"],
    "float8_e5m2": ["fp8_e5m2", "f8e5m2", "torch.float8_e5m2"],
}


@pytest.mark.parametrize(("name", "alias"), [(n, a) for n, all_ in ALIASES.items() for a in all_])
def test_aliases(name, alias):
    assert format_of(alias) is FORMATS[name]


@pytest.mark.parametrize("name", STORED)
def test_dtype_objects_of_numpy_and_ml_dtypes(name):
    dtype = numpy_dtype(name)
    assert format_of(dtype) is FORMATS[name]
    assert format_of(dtype.type) is FORMATS[name]
    assert format_of(FORMATS[name]) is FORMATS[name]


@pytest.mark.parametrize("name", STORED)
def test_dtype_objects_of_torch(name):
    torch = pytest.importorskip("torch", reason="reads torch's dtype objects")
    assert format_of(getattr(torch, name)) is FORMATS[name]


@pytest.mark.parametrize(
    "other", ["int8", np.int32, np.dtype("int64"), float, int, None, 3, b"f16"]
)
def test_what_is_no_known_format_is_refused(other):
    with pytest.raises(PolicyError, match="Known dtypes: float64, float32"):
        format_of(other)


def test_a_typing_error_gets_the_closest_name():
    with pytest.raises(PolicyError, match=r"unknown dtype 'flaot16'; did you mean 'float16'\?"):
        format_of("flaot16")


def test_the_ieee_e4m3_of_ml_dtypes_is_not_mistaken_for_e4m3fn():
    with pytest.raises(PolicyError, match="did you mean 'float8_e4m3fn'"):
        format_of("float8_e4m3")


@given(st.text(min_size=1))
def test_any_string_is_a_format_or_a_policy_error(text):
    known = text.strip().lower() in {a for all_ in ALIASES.values() for a in all_} | set(FORMATS)
    if known:
        assert format_of(text).name in FORMATS
    else:
        with pytest.raises(PolicyError, match="Known dtypes"):
            format_of(text)


def test_table_has_one_aligned_line_a_format():
    lines = formats_table().splitlines()
    assert lines[0].split()[:3] == ["format", "bits", "stored"]
    assert len({len(line) for line in lines}) == 1
    cells = {line.split()[0]: line.split() for line in lines[1:]}
    assert set(cells) == set(FORMATS)
    assert cells["tfloat32"][1:5] == ["19", "32", "8", "10"]
    assert cells["float16"][1:] == [
        *("16", "16", "5", "10"),
        *("65504", "6.10352e-05", "5.96046e-08", "0.000976562"),
    ]
