"""Runs the Keras tests and the contract in one process per Keras backend.

A process has one Keras backend, which KERAS_BACKEND names, so the tests proper are in
keras_*_checks.py, which pytest collects only when it is given their names. Two such processes run
at a time.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CHECKS = sorted(str(p) for p in HERE.glob("keras_*_checks.py"))


Done = subprocess.CompletedProcess[str]


def _checks(framework: str) -> Done:
    contract = f"{ROOT / 'tests' / 'test_contract.py'}::TestInstalled"
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-n0", "-k", "keras", *CHECKS, contract]
    env = {
        **os.environ,
        "KERAS_BACKEND": framework,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def _upstream(framework: str) -> Done:
    command = [sys.executable, "-P", str(HERE / "upstream_keras.py"), "--framework", framework]
    return subprocess.run(command, capture_output=True, text=True, check=False)


RUNS: dict[str, Callable[[str], Done]] = {
    "test_on_this_keras_backend": _checks,
    "test_keras_own_tests_pass_on_our_classes": _upstream,
}
"""What the process of a test runs, by the test's name."""


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], Future[Done]]]:
    """The processes of all tests of this module that were asked for, by test and framework."""
    with ThreadPoolExecutor(2) as pool:
        started = {}
        for item in request.session.items:
            name = getattr(item, "originalname", "")
            if item.path == Path(__file__) and name in RUNS:
                framework = item.callspec.params["framework"]  # type: ignore[attr-defined]
                if not _missing(framework):
                    started[name, framework] = pool.submit(RUNS[name], framework)
        yield started


def _missing(framework: str) -> list[str]:
    return [name for name in ("keras", framework) if importlib.util.find_spec(name) is None]


@pytest.mark.parametrize("framework", ["tensorflow", "jax", "torch"])
def test_on_this_keras_backend(framework: str, runs: dict[tuple[str, str], Future[Done]]) -> None:
    if missing := _missing(framework):
        pytest.skip(f"{missing[0]} is not installed")
    done = runs["test_on_this_keras_backend", framework].result()
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def _python(program: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="keras is not installed")
def test_a_missing_framework_is_no_broken_one() -> None:
    program = """
import sys
sys.modules["tensorflow"] = None
from importlib.metadata import EntryPoint
import polyamp
from polyamp import _registry
point = EntryPoint("keras", "polyamp_keras", _registry.GROUP)
_registry._announced = lambda: {"keras": point}
print("keras" in polyamp.backends())
try:
    polyamp.backend("keras")
except polyamp.BackendError as error:
    print(error, "|", error.__cause__.__cause__)
"""
    told = _python(program, KERAS_BACKEND="tensorflow")
    assert told.startswith("False\n")
    assert "'keras' needs tensorflow, which is not installed" in told
    assert "set the environment variable KERAS_BACKEND" in told


@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="keras is not installed")
def test_a_keras_backend_that_does_not_train_is_refused() -> None:
    told = _python("import polyamp.keras", KERAS_BACKEND="numpy")
    assert "BackendError: Keras runs on 'numpy' here, which does not train" in told


@pytest.mark.parametrize("framework", ["tensorflow", "jax", "torch"])
def test_keras_own_tests_pass_on_our_classes(
    framework: str, runs: dict[tuple[str, str], Future[Done]]
) -> None:
    keras = importlib.util.find_spec("keras")
    if keras is None or _missing(framework):
        pytest.skip(f"needs keras and {framework}")
    package = Path(keras.origin or "").parent
    if not (package / "src" / "optimizers" / "loss_scale_optimizer_test.py").is_file():
        pytest.skip("this keras comes without its tests; name a checkout to upstream_keras.py")
    done = runs["test_keras_own_tests_pass_on_our_classes", framework].result()
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    for made in ("LossScaleOptimizer", "DTypePolicy", "DTypePolicyMap"):
        assert f"'{made}': " in done.stdout
