"""Patterns of module paths: globs by segment, regular expressions, operation families.

See `polyamp._policy_map` for the grammar. A path is matched with a `.` put before each of its
segments, so that every segment of a glob becomes one piece of a regular expression:

    name  -> \\.name        *  -> \\.[^.]*        **  -> (?:\\.[^.]*)*
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from polyamp._errors import PolicyError, closest
from polyamp._formats import did_you_mean, shown
from polyamp._operations import FLOAT32_OPERATIONS

OP_FAMILIES = tuple(FLOAT32_OPERATIONS)
"""Operation families that an `op:` rule may name."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled module pattern.

    Attributes:
        text: the pattern as it was written.
        expression: matches the whole path, with a `.` before every segment for a glob.
    """

    text: str
    expression: re.Pattern[str]

    def matches(self, path: str) -> bool:
        """Whether the module at `path` (`""` is the model itself) fits the pattern."""
        subject = path if self.text.startswith("re:") or not path else f".{path}"
        return self.expression.fullmatch(subject) is not None


def op_family(pattern: str) -> str | None:
    """The operation family of an `op:` pattern, None for any other pattern.

    Raises:
        PolicyError: no such family.
    """
    if not pattern.startswith("op:"):
        return None
    family = pattern.removeprefix("op:")
    if family not in OP_FAMILIES:
        raise PolicyError(
            f"unknown operation family {shown(pattern)}{did_you_mean(family, OP_FAMILIES)}"
            f" Allowed: {', '.join(f'op:{name}' for name in OP_FAMILIES)}"
        )
    return family


def compile_pattern(text: str) -> Pattern:
    """The glob or `re:` expression in `text`, ready to match.

    Raises:
        PolicyError: it cannot be read; says why.
    """
    if not text.startswith("re:"):
        return Pattern(text, re.compile(_glob(text)))
    try:
        return Pattern(text, re.compile(text.removeprefix("re:")))
    except (re.error, ValueError, OverflowError, RecursionError, Warning) as error:
        raise PolicyError(
            f"pattern {shown(text)}: not a valid regular expression: {error}"
        ) from None


def _glob(pattern: str) -> str:
    """A glob as a regular expression for a path with a `.` before every segment."""
    segments = pattern.split(".") if pattern else []
    parts: list[str] = []
    for segment in segments:
        if segment == "**":
            part = r"(?:\.[^.]*)*"
            if parts[-1:] != [part]:
                parts.append(part)
        elif not segment:
            raise PolicyError(f"pattern {shown(pattern)}: empty segment; write one '.' between two")
        elif "**" in segment:
            raise PolicyError(
                f"pattern {shown(pattern)}: '**' must be a whole segment; write '*' to match within"
                f" {shown(segment)}"
            )
        else:
            parts.append(r"\." + _segment(segment, pattern))
    return "".join(parts)


def _segment(segment: str, pattern: str) -> str:
    out, i = "", 0
    while i < len(segment):
        char = segment[i]
        i += 1
        if char == "*":
            out += "[^.]*"
        elif char == "?":
            out += "[^.]"
        elif char == "[":
            end = segment.find("]", i + (2 if segment[i : i + 1] == "!" else 1))
            if end < 0:
                raise PolicyError(
                    f"pattern {shown(pattern)}: '[' without ']' in the same segment; write '[[]'"
                    " for the character itself"
                )
            out += _char_set(segment[i:end], pattern)
            i = end + 1
        else:
            out += re.escape(char)
    return out


def _char_set(body: str, pattern: str) -> str:
    negated = body.startswith("!")
    body = body.removeprefix("!")
    out, i = "", 0
    while i < len(body):
        low = high = body[i]
        if body[i + 1 : i + 2] == "-" and i + 2 < len(body):
            high = body[i + 2]
            i += 2
        i += 1
        if low > high:
            raise PolicyError(
                f"pattern {shown(pattern)}: range {low}-{high} is reversed; write {high}-{low}"
            )
        out += re.escape(low) if low == high else f"{re.escape(low)}-{re.escape(high)}"
    return rf"(?!\.)[{'^' if negated else ''}{out}]"


def nearest(pattern: str, paths: tuple[str, ...]) -> str:
    """The paths with a run of segments most like the literal part of `pattern`, as text."""
    if pattern.startswith("re:"):
        literal = [re.sub(r"\\(.)|[][(){}*+?^$|]", r"\1", pattern.removeprefix("re:"))]
    else:
        literal = [s for s in pattern.split(".") if s.strip("*?")]
    size = ".".join(literal).count(".") + 1
    runs: dict[str, str] = {}
    for path in paths:
        segments = path.split(".")
        for start in range(max(1, len(segments) - size + 1)):
            runs.setdefault(".".join(segments[start : start + size]), path)
    near = dict.fromkeys(runs[run] for run in closest(".".join(literal)[:80], runs, 3))
    if near:
        return f"nearest: {', '.join(map(repr, near))}"
    return f"paths are: {', '.join(map(repr, paths[:5]))}{', ...' if len(paths) > 5 else ''}"
