"""Number formats: what a bit layout can hold, worked out from the layout.

One sign bit, `exponent_bits`, `mantissa_bits`. With bias = 2**(exponent_bits - 1) - 1:

    exponent field 0                 0 and the subnormals, steps of 2**(1 - bias - mantissa_bits)
    exponent field 1 .. top          (1 + mantissa / 2**mantissa_bits) * 2**(field - bias)
    top exponent field, IEEE         infinities and NaN only
    top exponent field, e4m3fn       ordinary numbers; only the all-ones mantissa is NaN

Sources: IEEE 754-2019 (binary16, 32, 64); "FP8 Formats for Deep Learning", arXiv:2209.05433
(e4m3fn, e5m2); NVIDIA's A100 whitepaper (tfloat32).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from polyamp._errors import PolicyError, closest


@dataclass(frozen=True, slots=True)
class Format:
    """A binary floating-point format; every number below follows from the bit layout.

    Attributes:
        name: canonical name, as `FORMATS` lists it.
        bits: bits the format uses, the sign included (tfloat32: 19).
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the stored mantissa, without the implicit leading one.
        reserves_top_exponent: True where the largest exponent field holds only infinities and NaN
            (IEEE 754); False where it holds numbers and only the all-ones mantissa is NaN (e4m3fn).

    Raises:
        PolicyError: the widths do not add up to `bits`, or leave no room for a number.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    reserves_top_exponent: bool = True

    def __post_init__(self) -> None:
        if self.exponent_bits < 2 or self.mantissa_bits < 1:
            raise PolicyError(
                f"format {self.name}: needs at least 2 exponent bits and 1 mantissa bit, got "
                f"{self.exponent_bits} and {self.mantissa_bits}"
            )
        if self.bits != 1 + self.exponent_bits + self.mantissa_bits:
            raise PolicyError(
                f"format {self.name}: sign, {self.exponent_bits} exponent and "
                f"{self.mantissa_bits} mantissa bits are not {self.bits} bits"
            )

    @property
    def storage_bits(self) -> int:
        """Bits one number takes in memory: `bits` rounded up to a power of two, at least 8."""
        return max(8, 1 << (self.bits - 1).bit_length())

    @property
    def bias(self) -> int:
        """What is subtracted from the exponent field to get the exponent."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def max(self) -> float:
        """Largest finite number."""
        top_field = (1 << self.exponent_bits) - (2 if self.reserves_top_exponent else 1)
        lost_at_top = 1 if self.reserves_top_exponent else 2
        top_mantissa = 2.0 - math.ldexp(lost_at_top, -self.mantissa_bits)
        return math.ldexp(top_mantissa, top_field - self.bias)

    @property
    def smallest_normal(self) -> float:
        """Smallest positive number with full precision."""
        return math.ldexp(1.0, 1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive number; half of it, and everything below, rounds to 0."""
        return math.ldexp(1.0, 1 - self.bias - self.mantissa_bits)

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger number (twice the unit roundoff)."""
        return math.ldexp(1.0, -self.mantissa_bits)


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        f.name: f
        for f in (
            Format("float64", 64, exponent_bits=11, mantissa_bits=52),
            Format("float32", 32, exponent_bits=8, mantissa_bits=23),
            Format("tfloat32", 19, exponent_bits=8, mantissa_bits=10),
            Format("bfloat16", 16, exponent_bits=8, mantissa_bits=7),
            Format("float16", 16, exponent_bits=5, mantissa_bits=10),
            Format("float8_e5m2", 8, exponent_bits=5, mantissa_bits=2),
            Format("float8_e4m3fn", 8, 4, 3, reserves_top_exponent=False),
        )
    }
)
"""Every format polyamp knows, by canonical name, widest first. Read-only."""

_ALIASES = {
    "float64": "fp64 f64 double",
    "float32": "fp32 f32 float full single",
    "tfloat32": "tf32",
    "bfloat16": "bf16",
    "float16": "fp16 f16 half",
    "float8_e5m2": "fp8_e5m2 f8_e5m2 f8e5m2 e5m2",
    "float8_e4m3fn": "fp8_e4m3fn fp8_e4m3 f8_e4m3fn f8e4m3fn e4m3fn e4m3",
}
_NAMES = {a: name for name, more in _ALIASES.items() for a in (name, *more.split())}
_MODULES = ("torch.", "numpy.", "np.", "jax.numpy.", "jnp.", "ml_dtypes.", "tf.", "tensorflow.")


def shown(value: object, limit: int = 80) -> str:
    """`repr(value)`, cut to about `limit` characters, for an error message."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` with the entry of `names` most like `word`, or `"."` if none is."""
    by_lower = {name.lower(): name for name in names}
    near = closest(word.strip().lower()[:80], by_lower)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else "."


def format_of(name: object) -> Format:
    """The format a name or a dtype object means.

    Args:
        name: a canonical name or alias (`"fp16"`, `"half"`, `"tf32"`; case and surrounding spaces
            do not matter; `"torch."`, `"np."` and the like may stand before it), or a dtype of
            torch, numpy, ml_dtypes, jax or tensorflow, or a `Format`.

    Raises:
        PolicyError: no such format; names the closest one and lists all.
    """
    if isinstance(name, Format):
        return name
    text = _text(name)
    known = None if text is None else _NAMES.get(text)
    if known is not None:
        return FORMATS[known]
    hint = did_you_mean(text or "", _NAMES)
    raise PolicyError(f"unknown dtype {shown(name)}{hint} Known dtypes: {', '.join(FORMATS)}")


def _text(name: object) -> str | None:
    if isinstance(name, str):
        text = name.strip().lower()
        module = next((m for m in _MODULES if text.startswith(m)), "")
        return text[len(module) :]
    if isinstance(name, type):
        return name.__name__ if name.__name__ in FORMATS else None
    own = getattr(name, "name", None)
    if isinstance(own, str):
        return own
    if type(name).__module__ == "torch":
        return str(name).removeprefix("torch.")
    return None


def formats_table() -> str:
    """All formats as a plain-text table, one line each, numbers to six significant digits.

    `stored` is the width in memory where it is not `bits`: tfloat32 uses 19 bits of 32.
    """
    rows = [_HEAD, *(_row(f) for f in FORMATS.values())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


_HEAD: tuple[str, ...] = (
    *("format", "bits", "stored", "exponent", "mantissa"),
    *("largest", "smallest normal", "smallest subnormal", "epsilon"),
)


def _row(f: Format) -> tuple[str, ...]:
    layout = (f.bits, f.storage_bits, f.exponent_bits, f.mantissa_bits)
    values = (f.max, f.smallest_normal, f.smallest_subnormal, f.epsilon)
    return (f.name, *map(str, layout), *(f"{v:.6g}" for v in values))
