"""`import polyamp` is light: no framework, not even numpy. Its public names tell the truth."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

import polyamp

PACKAGE = Path(polyamp.__file__).parent
FRAMEWORKS = ["torch", "tensorflow", "keras", "jax", "jaxlib", "flax", "optax"]
HEAVY = [*FRAMEWORKS, "numpy", "ml_dtypes", "pandas", "rich", "importlib.metadata"]
CORE = [
    "polyamp",
    *(f"polyamp.{p.stem}" for p in sorted(PACKAGE.glob("_*.py")) if p.stem[1] != "_"),
]


def imported(module: str, heavy: list[str], path: Path | None = None) -> list[str]:
    """Which of `heavy` a fresh Python has loaded after `import module`."""
    code = f"import sys, {module}; print(*[m for m in {heavy!r} if m in sys.modules])"
    search = [*([str(path)] if path else []), str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.parametrize("module", CORE)
def test_the_core_imports_nothing_heavy(module: str) -> None:
    assert imported(module, HEAVY) == []


@pytest.mark.parametrize("module", ["polyamp.testing", "polyamp.cli"])
def test_what_stands_on_the_core_imports_no_framework(module: str) -> None:
    assert imported(module, FRAMEWORKS) == []


@pytest.mark.parametrize("heavy", HEAVY)
def test_the_check_can_fail(heavy: str, tmp_path: Path) -> None:
    if "." not in heavy:
        (tmp_path / f"{heavy}.py").write_text("")
    (tmp_path / "guilty.py").write_text(f"import polyamp\nimport {heavy}\n")
    assert imported("guilty", HEAVY, tmp_path) == [heavy]


def public() -> dict[str, object]:
    return {
        name: value
        for name, value in vars(polyamp).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }


def test_the_core_is_all_listed() -> None:
    assert {"polyamp", "polyamp._scaling", "polyamp._dynamic", "polyamp._registry"} <= set(CORE)
    assert len(CORE) >= 9


def test_public_names_are_those_re_exported_as_themselves() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    aliases = [a for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names]
    assert [a.name for a in aliases if a.asname != a.name] == []
    assert sorted(public()) == sorted(a.name for a in aliases)


def test_all_is_every_public_name() -> None:
    assert sorted(polyamp.__all__) == sorted(public())
    assert len(set(polyamp.__all__)) == len(polyamp.__all__)


def documented_constants() -> dict[str, str]:
    """Module-level names with the string that follows their assignment, over the whole core."""
    found: dict[str, str] = {}
    for path in PACKAGE.glob("_*.py"):
        body = ast.parse(path.read_text()).body
        for node, after in pairwise(body):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", 0)]
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                names = [t.id for t in targets if isinstance(t, ast.Name)]
                found |= {name: str(after.value.value) for name in names}
    return found


@pytest.mark.parametrize("name", sorted(public()))
def test_every_public_name_is_documented(name: str) -> None:
    value = public()[name]
    doc = value.__doc__ if callable(value) else documented_constants().get(name)
    assert len(doc or "") > 20
    assert not (doc or "").startswith(f"{name}("), "a generated docstring documents nothing"


@pytest.mark.parametrize("name", sorted(n for n, v in public().items() if isinstance(v, type)))
def test_every_public_method_is_documented(name: str) -> None:
    cls = public()[name]
    bare = [
        member
        for member, value in vars(cls).items()
        if not member.startswith("_")
        and (callable(value) or isinstance(value, (property, classmethod, staticmethod)))
        and not (getattr(value, "__doc__", None) or "").strip()
    ]
    assert bare == []
