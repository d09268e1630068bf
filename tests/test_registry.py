"""Backends are modules found by entry point; each way that can go wrong has its own error."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import polyamp_toy
import pytest

import polyamp
from polyamp import BackendError

PLUGIN = Path(__file__).parent / "plugin"
MEMBERS = [
    "NAME",
    "xp",
    "inspect",
    "unscale",
    "select",
    "cast",
    "reduce",
    "compiled",
    "devices",
    "modes",
    "replay",
    "toy_train",
]

Announce = Callable[..., None]


@pytest.fixture
def announce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Announce]:
    """Installs a distribution without pip: its metadata, and its modules where it has some."""
    known = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(distribution: str, points: dict[str, str], **modules: str) -> None:
        info = tmp_path / f"{distribution}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        )
        lines = [f"{name} = {module}" for name, module in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[polyamp.backends]", *lines, ""]))
        for name, source in modules.items():
            (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()

    yield install
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) is None:
            continue
        if str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


@pytest.fixture
def toy(announce: Announce) -> None:
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    announce("polyamp_toy", project["entry-points"]["polyamp.backends"])


def test_a_third_party_backend_is_found_by_its_entry_point(toy: None) -> None:
    found = polyamp.backend("toy")
    assert found is polyamp_toy
    assert found.NAME == "toy"
    assert polyamp.backends()["toy"] is polyamp_toy


def test_a_module_is_a_backend(backend: ModuleType) -> None:
    for module in (backend, polyamp_toy):
        assert [name for name in MEMBERS if not hasattr(module, name)] == []
    assert sorted(set(vars(polyamp.Backend)) & set(MEMBERS)) == sorted(set(MEMBERS) - {"NAME"})


def test_an_unknown_name_gets_the_closest(toy: None) -> None:
    with pytest.raises(BackendError, match=r"no backend 'toyy': found .*toy.* mean 'toy'\?"):
        polyamp.backend("toyy")


@pytest.mark.parametrize("name", ["", "xyzzy", "polyamp_toy.py", None, ["toy"]])
def test_what_is_like_no_name_gets_the_list(toy: None, name: Any) -> None:
    with pytest.raises(BackendError, match=r"found .*toy.*entry-point group 'polyamp.backends'"):
        polyamp.backend(name)


def test_two_modules_under_one_name_are_refused(announce: Announce) -> None:
    announce("first", {"twice": "first_module"}, first_module="NAME = 'twice'")
    announce("second", {"twice": "second_module"}, second_module="NAME = 'twice'")
    words = "two backends are called 'twice': .*(first|second)_module and .*_module.*Uninstall"
    for call in (lambda: polyamp.backend("twice"), polyamp.backends, lambda: polyamp.backend("x")):
        with pytest.raises(BackendError, match=words):
            call()


def test_one_module_announced_twice_is_one_backend(announce: Announce) -> None:
    announce("first", {"toy": "polyamp_toy"})
    announce("again", {"toy": "polyamp_toy"})
    assert polyamp.backend("toy") is polyamp_toy


def test_a_missing_framework_is_named_and_passed_over(announce: Announce, toy: None) -> None:
    announce("absent", {"absent": "for_absent"}, for_absent="import absent_framework.nn")
    with pytest.raises(BackendError, match="'absent' needs absent_framework, which is not inst"):
        polyamp.backend("absent")
    assert "absent" not in polyamp.backends()
    assert "toy" in polyamp.backends()


@pytest.mark.parametrize(
    ("framework", "error", "words"),
    [
        ("raise ImportError('libfoo.so.3: cannot open')", ImportError, "libfoo.so.3"),
        ("import broken_framework._C", ModuleNotFoundError, "broken_framework._C"),
        (
            "import a_module_the_framework_needs",
            ModuleNotFoundError,
            "a_module_the_framework_needs",
        ),
        ("raise RuntimeError('driver too old')", RuntimeError, "driver too old"),
    ],
)
def test_a_broken_framework_raises_its_own_error(
    announce: Announce, framework: str, error: type[Exception], words: str
) -> None:
    announce(
        "broken",
        {"broken": "for_broken"},
        for_broken="import broken_framework",
        broken_framework=framework,
    )
    for call in (lambda: polyamp.backend("broken"), polyamp.backends):
        with pytest.raises(error, match=words) as caught:
            call()
        assert type(caught.value) is error


def test_a_framework_too_old_for_the_backend_is_not_called_missing(announce: Announce) -> None:
    announce("early", {"early": "for_early"}, for_early="import tomllib.a_later_addition")
    for call in (lambda: polyamp.backend("early"), polyamp.backends):
        with pytest.raises(ModuleNotFoundError, match=r"tomllib\.a_later"):
            call()


def test_a_stale_announcement_raises_the_import_error(announce: Announce) -> None:
    announce("stale", {"stale": "module_that_is_gone"})
    with pytest.raises(ModuleNotFoundError, match="module_that_is_gone"):
        polyamp.backend("stale")


def test_a_module_that_lacks_members_is_named_with_them(announce: Announce) -> None:
    source = "NAME = 'half'\nxp = inspect = unscale = select = cast = reduce = None\n"
    announce("half", {"half": "half_module"}, half_module=source)
    with pytest.raises(
        BackendError, match=r"'half' .half_module. lacks compiled, devices, modes, r"
    ):
        polyamp.backend("half")


def test_looking_for_one_backend_imports_no_other(announce: Announce, toy: None) -> None:
    announce("loud", {"loud": "loud_module"}, loud_module="raise RuntimeError('imported')")
    assert polyamp.backend("toy").NAME == "toy"
    with pytest.raises(RuntimeError, match="imported"):
        polyamp.backends()
