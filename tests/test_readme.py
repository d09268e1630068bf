"""The code in README and docs runs, and the README's commands are the ones CI runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


@pytest.mark.filterwarnings("default::UserWarning")
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_python_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = blocks(page)
    for framework in ("torch", "jax", "flax", "tensorflow", "keras"):
        if any(f"import {framework}" in block or f"from {framework}" in block for block in code):
            pytest.importorskip(framework, reason=f"{page.name} shows it")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page.stem}
    for number, block in enumerate(code, 1):
        exec(compile(block, f"{page.name} block {number}", "exec"), names)
    assert code


def test_readme_has_blocks() -> None:
    assert len(blocks(ROOT / "README.md")) >= 3


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    install = "python3 -m venv .venv && .venv/bin/pip install -c .ci/constraints.txt -e"
    assert f'{install} ".[all]" && .venv/bin/polyamp demo\n' in text
    assert f'{install} ".[all,test]" && .venv/bin/pytest\n' in text
    assert (
        r"grep -m1 -E '^python3 -m venv \.venv .*/pytest$' README.md"
        in (ROOT / ".ci" / "run").read_text()
    )


def test_table_names_tests_that_exist() -> None:
    named = set(re.findall(r"`(Test\w+)` \|$", (ROOT / "README.md").read_text(), re.MULTILINE))
    sources = (ROOT / "tests" / "backends").glob("test_torch_beyond*.py")
    defined = set(re.findall(r"^class (Test\w+)", "".join(s.read_text() for s in sources), re.M))
    assert len(named) >= 10
    assert named <= defined
