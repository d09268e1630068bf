"""Which backends and arithmetics the tests run on."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

HERE = Path(__file__).parent
PLUGIN = HERE / "plugin"
sys.path.insert(0, str(PLUGIN))

settings.register_profile("polyamp", derandomize=True, deadline=None, max_examples=100)
settings.load_profile("polyamp")

with (HERE.parent / "pyproject.toml").open("rb") as file:
    BACKENDS: dict[str, str] = tomllib.load(file)["project"]["entry-points"]["polyamp.backends"]
IN_PROCESS = [n for n in sorted(BACKENDS) if n != "keras" or "KERAS_BACKEND" in os.environ]
"""Backends tested in this process; Keras has a process for each of its own backends."""
REQUIRED = {name for name in os.environ.get("POLYAMP_BACKENDS", "").split(",") if name}


def load(name: str) -> ModuleType:
    """polyamp's own backend for the framework `name`; skips where the framework is missing.

    A framework named in the environment variable POLYAMP_BACKENDS must be there.
    """
    if name not in REQUIRED and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed and POLYAMP_BACKENDS does not ask for it")
    return importlib.import_module(BACKENDS[name])


def has_accelerator() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    unknown = REQUIRED - set(BACKENDS)
    if unknown:
        raise pytest.UsageError(
            f"POLYAMP_BACKENDS names {sorted(unknown)}; polyamp has {sorted(BACKENDS)}"
        )
    # torch 2.13 imports its own deprecated API when torch.compile is first used.
    config.addinivalue_line("filterwarnings", "ignore:.torch.jit.script:DeprecationWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not has_accelerator():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator; none is visible here"))


@pytest.fixture(scope="session", params=IN_PROCESS)
def backend(request: pytest.FixtureRequest) -> ModuleType:
    """Every backend of polyamp's own whose framework is installed."""
    return load(request.param)


@pytest.fixture(scope="session", params=["python", "numpy", *IN_PROCESS])
def arithmetic(request: pytest.FixtureRequest) -> Any:
    """Every kind of number a transition runs on: see `arithmetics.Arithmetic`."""
    from arithmetics import PYTHON, Arithmetic

    if request.param == "python":
        return PYTHON
    if request.param == "numpy":
        return Arithmetic("numpy", importlib.import_module("polyamp_toy").xp)
    return Arithmetic(request.param, load(request.param).xp)


@pytest.fixture
def fresh_compiler() -> Any:
    """torch.compile with nothing remembered, before and after."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
