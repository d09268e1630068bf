"""Rules and generated traces as text: `NAME`, `NAME:VALUE` or `NAME:KEY=VALUE,KEY=VALUE`.

torch, auto, two-phase                           what `rule=` takes, with its defaults
megatron:growth_interval=500                     ... with other parameters
dynamic:init_scale=2**16,growth_interval=100
static:1024                                      a value without key is init_scale
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any, NamedTuple

from polyamp._errors import PolyampError, RuleError, closest
from polyamp._presets import PRESETS, like, resolve_rule
from polyamp._scaling import Rule

_POWER = re.compile(r"([+-]?\d{1,9})(?:\*\*|\^)([+-]?\d{1,3})")
_WORDS = {"true": True, "false": False, "none": None}


class Expression(NamedTuple):
    """A parsed expression."""

    text: str
    name: str
    first: str | None
    """A value without a key."""
    values: dict[str, str]


def parse_expression(text: str) -> Expression:
    """Split an expression.

    Raises:
        PolyampError: empty, a key without value or given twice, a value without key that is not
            the first.
    """
    name, colon, rest = text.partition(":")
    name = name.strip().lower()
    if not name or (colon and not rest.strip()):
        raise PolyampError(f"{text!r} is not NAME, NAME:VALUE or NAME:KEY=VALUE,KEY=VALUE")
    first: str | None = None
    values: dict[str, str] = {}
    for i, part in enumerate(rest.split(",") if colon else ()):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals and i == 0 and key:
            first = key
        elif not equals or not key or not value:
            raise PolyampError(f"{text!r}: {part.strip()!r} is not KEY=VALUE")
        elif key in values:
            raise PolyampError(f"{text!r}: {key} is given twice")
        else:
            values[key] = value
    return Expression(text, name, first, values)


def parse_rule(text: str) -> Rule:
    """The rule that `text` names.

    Raises:
        RuleError: not an expression; an unknown name or parameter; a value outside its range.
    """
    try:
        parsed = parse_expression(text)
        values = {key: read_value(value) for key, value in parsed.values.items()}
        if parsed.first is not None:
            if "init_scale" in values:
                raise PolyampError(f"{text!r}: init_scale is given twice")
            values["init_scale"] = read_value(parsed.first)
    except PolyampError as error:
        raise RuleError(f"rule {error}") from error
    if parsed.name in PRESETS:
        return like(parsed.name, **values)
    rule = resolve_rule(parsed.name)
    allowed = [f.name for f in fields(rule)]  # type: ignore[arg-type]
    for key in values:
        if key not in allowed:
            near = closest(key, allowed, likeness=0.6)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise RuleError(
                f"{type(rule).__name__} has no parameter {key!r}{hint} It has: {', '.join(allowed)}"
            )
    return replace(rule, **values)  # type: ignore[type-var]


def read_value(text: str) -> Any:
    """A number, a power such as 2**16, true, false, none; anything else stays text.

    Raises:
        PolyampError: a power that no float64 holds.
    """
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    power = _POWER.fullmatch(text)
    if power:
        base, exponent = int(power[1]), int(power[2])
        if base == 0 and exponent < 0:
            raise PolyampError(f"{text!r} is not a number")
        try:
            return base**exponent if exponent >= 0 else float(base) ** exponent
        except OverflowError as error:
            raise PolyampError(f"{text!r} is out of range") from error
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
