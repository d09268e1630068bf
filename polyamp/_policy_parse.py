"""What users already write for a policy, read into the six fields of `Policy`.

    text contains "="       key=dtype pairs (jmp); params defaults to float32, compute follows
                            params, output follows compute
    a name in `DIALECTS`    Keras, Lightning, Accelerate, apex
    a dtype                 parameters, compute and output alike (jmp, Keras)
    ...@2^j                 any of these; gradients inside the module are 2**j times as large

Case, surrounding spaces, and "-" for "_" do not matter. Sources, read for the facts:
jmp `jmp/_src/policy.py`; Keras `keras/src/dtype_policies/dtype_policy.py`; Lightning
`fabric/plugins/precision/precision.py` and the plugins beside it; Accelerate
`src/accelerate/accelerator.py` (outputs go to float32); apex `apex/amp/frontend.py`,
`apex/amp/_initialize.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from polyamp._errors import PolicyError
from polyamp._formats import FORMATS, did_you_mean, format_of, shown

Fields = tuple[str, str, str, str | None, str | None, str | None]
"""param_dtype, compute_dtype, output_dtype, master_dtype, store_dtype, accumulate_dtype."""


def _fields(param: str, compute: str, output: str, master: str | None = None) -> Fields:
    return (param, compute, output, master, None, None)


_F16_MIXED = _fields("float32", "float16", "float32")
_BF16_MIXED = _fields("float32", "bfloat16", "float32")
_SAME = {name: _fields(name, name, name) for name in ("float16", "bfloat16", "float32", "float64")}
_TF32 = _fields("float32", "tfloat32", "float32")

DIALECTS: Mapping[str, Mapping[str, Fields]] = MappingProxyType(
    {
        "Keras": {
            "mixed_float16": _fields("float32", "float16", "float16"),
            "mixed_bfloat16": _fields("float32", "bfloat16", "bfloat16"),
            **_SAME,
        },
        "Lightning": {
            "16-mixed": _F16_MIXED,
            "bf16-mixed": _BF16_MIXED,
            "16-true": _SAME["float16"],
            "bf16-true": _SAME["bfloat16"],
            "32-true": _SAME["float32"],
            "64-true": _SAME["float64"],
            "16": _F16_MIXED,
            "32": _SAME["float32"],
            "64": _SAME["float64"],
        },
        "Accelerate": {"fp16": _F16_MIXED, "bf16": _BF16_MIXED, "no": _SAME["float32"]},
        "apex": {
            "O0": _SAME["float32"],
            "O1": _F16_MIXED,
            "O2": _fields("float16", "float16", "float32", master="float32"),
            "O3": _fields("float16", "float16", "float32"),
        },
    }
)
"""Named policies by the system they come from; a name means the same in all that have it."""

_LOOKUP = {
    name.lower().replace("-", "_"): value
    for names in DIALECTS.values()
    for name, value in names.items()
}

KEYS = ("params", "compute", "output", "master", "store", "accumulate")
"""Keys of the key=dtype form, in the order of `Fields`."""

_KEY_OF = {
    **{key: key for key in KEYS},
    **{f"{key.removesuffix('s')}_dtype": key for key in KEYS},
    "param": "params",
    "p": "params",
    "c": "compute",
    "o": "output",
}

_NOT_A_POLICY = {
    "fp8": "what fp8 means is up to Transformer Engine's recipe",
    "float8": "Keras' float8 is a quantization mode",
    "transformer_engine": "what it means is up to Transformer Engine's recipe",
    "transformer_engine_float16": "what it means is up to Transformer Engine's recipe",
    "float8_e4m3fn": "parameters and outputs in 8 bits do not train",
    "float8_e5m2": "parameters and outputs in 8 bits do not train",
}
_FP8_FORM = "params=float32,compute=float8_e4m3fn,output=float32"

_KEYS_FORM = (
    ",".join(f"{key}=DTYPE" for key in KEYS)
    + f" (each optional; short p=, c=, o=), with DTYPE one of {', '.join(FORMATS)}"
)
_ALLOWED = (
    "Allowed: "
    + "; ".join(f"{system}: {', '.join(names)}" for system, names in DIALECTS.items())
    + f"; a dtype alone (f16, half, f32, full, f64, tf32); or {_KEYS_FORM}"
)


def parse_fields(text: str) -> Fields:
    """The six fields that `text` means, dtypes by their canonical names.

    Raises:
        PolicyError: lists what is allowed and the closest match.
    """
    if "=" in text:
        return _parse_keys(text)
    name = text.strip().lower().replace("-", "_")
    if name in _LOOKUP:
        return _LOOKUP[name]
    return _parse_dtype(text)


def parse_shift(own: str, text: str) -> int:
    """j of "2^j", the part of a policy's `text` behind "@".

    Raises:
        PolicyError: it is something else.
    """
    found = re.fullmatch(r"\s*2\^(-?\d{1,3})\s*", own)
    if found is None:
        raise PolicyError(
            f"policy {shown(text)}: behind '@' stands a power of two of the module's own, such as"
            f" '@2^12', got {shown(own)}"
        )
    return int(found[1])


def _parse_dtype(text: str) -> Fields:
    try:
        dtype = format_of(text).name
    except PolicyError:
        dtype = text.strip().lower().replace("-", "_")
    if dtype in _SAME:
        return _SAME[dtype]
    if dtype == "tfloat32":
        return _TF32
    if dtype in _NOT_A_POLICY:
        raise PolicyError(
            f"{shown(text)} alone is not a policy: {_NOT_A_POLICY[dtype]}. Write the fields out,"
            f" for example {_FP8_FORM!r}"
        )
    hint = did_you_mean(text, (*FORMATS, *(n for names in DIALECTS.values() for n in names)))
    raise PolicyError(f"unknown policy {shown(text)}{hint} {_ALLOWED}")


def _parse_keys(text: str) -> Fields:
    found: dict[str, str | None] = {}
    for item in text.split(","):
        key, _, value = (part.strip() for part in item.partition("="))
        if not key or not value:
            raise PolicyError(
                f"policy {shown(text)}: {shown(item)} is not of the form key=dtype."
                f" Allowed: {_KEYS_FORM}"
            )
        field = _key(key, text)
        if field in found:
            raise PolicyError(f"policy {shown(text)}: {field!r} is given twice; keep one")
        found[field] = _value(field, value, text)
    param = found.get("params") or "float32"
    compute = found.get("compute") or param
    output = found.get("output") or compute
    master, store, accumulate = (found.get(key) for key in KEYS[3:])
    return (param, compute, output, master, store, accumulate)


def _key(key: str, text: str) -> str:
    field = _KEY_OF.get(key.lower())
    if field is None:
        hint = did_you_mean(key, _KEY_OF)
        raise PolicyError(
            f"policy {shown(text)}: unknown key {shown(key)}{hint} Allowed keys: {', '.join(KEYS)}"
            " (short: p, c, o)"
        )
    return field


def _value(field: str, value: str, text: str) -> str | None:
    if value.lower() == "none" and field in KEYS[3:]:
        return None
    try:
        return format_of(value).name
    except PolicyError as error:
        raise PolicyError(f"policy {shown(text)}: {field}: {error}") from None
