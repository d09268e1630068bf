"""Where Triton is: the kernel, under its interpreter. Everywhere: when the kernel is used."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from polyamp_torch import _triton  # noqa: E402

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
HAS_TRITON = importlib.util.find_spec("triton") is not None


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_the_kernel_under_the_interpreter() -> None:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-n0", str(HERE / "triton_checks.py")]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 3, 4, 5)
    assert not _triton.usable([x])
    plain = _triton._is_plain
    assert plain(x)
    assert plain(x.to(memory_format=torch.channels_last))
    assert plain(x.half())
    assert not plain(x.double())
    assert not plain(x[:, 1:])
    assert not plain(torch.ones(1).expand(4))
    assert not plain(torch.nn.Parameter(x))
    monkeypatch.setenv("POLYAMP_TRITON", "0")
    assert not _triton._works.__wrapped__(torch.device("cpu"))


def test_a_triton_that_does_not_work_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(values: object, inverse: object = None) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(_triton, "one_pass", broken)
    with pytest.warns(UserWarning, match="Triton does not work on cpu.*no C compiler"):
        assert not _triton._works.__wrapped__(torch.device("cpu"))
