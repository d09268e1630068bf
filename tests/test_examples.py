"""Every example runs for a few steps."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")
def test_torch_resume(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="the example is about PyTorch")
    runpy.run_path(str(EXAMPLES / "torch_resume.py"))["main"](40)
    scale, equal = capsys.readouterr().out.splitlines()
    assert "of 40 steps skipped" in scale
    assert int(scale.split()[2]) > 0
    assert equal.endswith("True")


def test_torch_two_towers(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="the example is about PyTorch")
    runpy.run_path(str(EXAMPLES / "torch_two_towers.py"))["main"](150)
    *tree, result = capsys.readouterr().out.splitlines()
    assert float(result.split(" %")[0]) > 60.0
    assert any("image: Sequential  float32 -> float16 -> float32" in line for line in tree)


def test_torch_two_towers_calibrated(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="the example is about PyTorch")
    runpy.run_path(str(EXAMPLES / "torch_two_towers.py"))["main"](150, "calibrate")
    *tree, result = capsys.readouterr().out.splitlines()
    assert float(result.split(" %")[0]) > 60.0
    assert any("first: Linear    float32 -> float16 -> float32" in line for line in tree)
    assert any("float32 -> bfloat16 -> float32" in line for line in tree)


def test_jax_train(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("flax", reason="the example is about JAX and flax")
    runpy.run_path(str(EXAMPLES / "jax_train.py"))["main"](40)
    lines = capsys.readouterr().out.splitlines()
    names = ["train_linen", "train_nnx_optimizer", "train_nnx_pytrees"]
    assert [line.split(":")[0] for line in lines] == names
    for line in lines:
        first, last = map(float, line.split("loss ")[1].split(" -> "))
        assert last < 0.4 * first


@pytest.mark.parametrize("framework", ["tensorflow", "jax", "torch"])
def test_keras_fit(framework: str) -> None:
    for needed in ("keras", framework):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    done = subprocess.run(
        [sys.executable, "-P", str(EXAMPLES / "keras_fit.py"), "4"],
        env={**os.environ, "KERAS_BACKEND": framework, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *_, state, accuracies = done.stdout.splitlines()
    assert state == f"{framework}: scale 32768, reloaded: True"
    mixed, served = (float(part.split()[-1]) for part in accuracies.split(", "))
    assert mixed > 0.5
    assert served == pytest.approx(mixed, abs=0.02)


def test_every_example_is_tested() -> None:
    source = Path(__file__).read_text()
    assert [p.name for p in EXAMPLES.glob("*.py") if p.name not in source] == []
