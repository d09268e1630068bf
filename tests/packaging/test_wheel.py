"""The wheel, built and installed in a fresh environment, imports and passes the contract."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BACKENDS: dict[str, str] = PROJECT["entry-points"]["polyamp.backends"]

CONTRACT = """
import polyamp_torch, torch
from polyamp.testing import BackendContract

class TestTorch(BackendContract):
    backend = polyamp_torch

    @staticmethod
    def to_array(value):
        return torch.from_numpy(value.copy())

    @staticmethod
    def to_numpy(value):
        return value.detach().numpy()
"""


def run(*command: object, cwd: Path) -> str:
    """The command's output; a failure shows it."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=clean, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel; what polyamp needs is lent by ours."""
    home = tmp_path_factory.mktemp("env")
    venv.create(home, with_pip=True)
    fresh = home / ("Scripts" if os.name == "nt" else "bin") / "python"
    run(fresh, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=home)
    site = run(fresh, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home)
    lent = Path(site.strip()) / "lent.pth"
    lent.write_text(sysconfig.get_path("purelib") + "\n")
    return fresh


def test_what_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    packages = {"polyamp", *BACKENDS.values()}
    assert tops == {*packages, next(t for t in tops if t.endswith(".dist-info"))}
    assert {f"{package}/py.typed" for package in packages} <= set(names)
    assert any(name.endswith("licenses/docs/LICENSE") for name in names)


def test_imports_from_the_wheel(python: Path, tmp_path: Path) -> None:
    code = "import polyamp, polyamp.torch; print(polyamp.__file__, *sorted(polyamp.backends()))"
    where, *found = run(python, "-c", code, cwd=tmp_path).split()
    assert str(python.parents[1]) in where
    assert found == sorted(name for name in BACKENDS if importlib.util.find_spec(name))


def test_commands(python: Path, tmp_path: Path) -> None:
    table = run(python.parent / "polyamp", "formats", cwd=tmp_path)
    assert "65504" in table


def test_contract(python: Path, tmp_path: Path) -> None:
    (tmp_path / "test_contract.py").write_text(CONTRACT)
    out = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path, cwd=tmp_path)
    assert " passed" in out
    assert "failed" not in out
