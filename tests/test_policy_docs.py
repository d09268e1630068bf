"""docs/policy.md tells the truth: its tables against the code, its examples executed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from polyamp._policy import PRESETS, Policy
from polyamp._policy_pattern import compile_pattern

TEXT = (Path(__file__).parents[1] / "docs" / "policy.md").read_text(encoding="utf-8")


def table(head: str) -> list[list[str]]:
    """Cells of the rows under the table head that starts with `head`."""
    rows = TEXT.split(f"| {head} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[c.strip() for c in re.split(r"(?<!\\)\|", row.strip("|"))] for row in rows]


def codes(cell: str) -> list[str]:
    return [text.replace(r"\|", "|") for text in re.findall(r"`([^`]*)`", cell)]


DIALECT_ROWS = [(name, row[1:]) for row in table("text") for name in codes(row[0])]
PATTERN_ROWS = [(codes(row[0])[0], codes(row[1]), codes(row[2])) for row in table("pattern")]


@pytest.mark.parametrize(("text", "cells"), DIALECT_ROWS)
def test_the_table_of_dialects(text, cells):
    assert Policy.parse(text) == Policy(*(cell or None for cell in cells))


def test_the_table_of_dialects_has_every_preset():
    assert set(PRESETS) <= {text for text, _ in DIALECT_ROWS}


@pytest.mark.parametrize(("pattern", "matches", "misses"), PATTERN_ROWS)
def test_the_table_of_patterns(pattern, matches, misses):
    compiled = compile_pattern(pattern)
    assert [path for path in matches if not compiled.matches(path)] == []
    assert [path for path in misses if compiled.matches(path)] == []
    assert matches or pattern == "**"


def test_the_examples_run():
    pytest.importorskip("torch", reason="docs/policy.md shows PyTorch")
    blocks = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/policy.md", "exec"), names)
    assert len(blocks) == 6
    assert names["rules"].policy_for("encoder") == Policy.parse("16-mixed")
