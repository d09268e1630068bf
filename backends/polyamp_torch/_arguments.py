"""What GradScaler's constructor is given, and the rule that comes of it."""

from __future__ import annotations

from typing import Any

from polyamp._errors import RuleError
from polyamp._presets import like, resolve_rule
from polyamp._scaling import Rule

TORCH = like("torch")
"""torch.amp.GradScaler's rule, with its defaults."""


class DefaultFloat(float):
    """A default that is told from the same number given."""


class DefaultInt(int):
    """A default that is told from the same number given."""


def is_given(value: Any) -> bool:
    """Whether an argument was given by the caller."""
    return not isinstance(value, (DefaultFloat, DefaultInt, type(None)))


def whole(value: Any) -> Any:
    """torch takes 2000.0 for a growth interval, and 10**12 for never; the rule wants an int32."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return min(value, 2**31 - 1) if type(value) is int else value


def rule_from(rule: Rule | str | None, given: dict[str, Any]) -> Rule:
    """The rule that the constructor's arguments mean.

    Args:
        rule: as users pass it.
        given: torch's and our parameters of a rule that were given beside it.

    Raises:
        RuleError: both, or a parameter out of range.
    """
    if rule is None:
        return like("torch", **given)
    if given:
        first, value = next(iter(given.items()))
        raise RuleError(
            f"give either rule= or {', '.join(given)}, not both; a rule takes them itself, as in"
            f' Dynamic.like("megatron", {first}={value!r})'
        )
    return resolve_rule(rule)
