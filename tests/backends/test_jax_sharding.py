"""4 devices: one decision on all of them, gradients averaged in float32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="these tests are about JAX")

from polyamp import Reason

SCRIPT = Path(__file__).parent.parent / "jax_sharded_cases.py"
MAPPED = ["vma", "no vma", "update", "update, no vma"]


@pytest.fixture(scope="module")
def found():
    """What the cases found, in a process with 4 host devices and strict dtype promotion."""
    path = os.pathsep.join(os.path.abspath(p) for p in sys.path)
    done = subprocess.run(
        [sys.executable, "-P", SCRIPT],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_there_are_devices_to_disagree(found):
    assert found["devices"] == 4


@pytest.mark.parametrize("way", MAPPED)
class TestShardMap:
    def test_four_scaled_float16_gradients_of_30000_average_to_30000(self, found, way):
        assert found[f"{way} large"] == [-3750.0, 8.0, 0, Reason.CLEAN]

    def test_different_gradients_are_averaged(self, found, way):
        assert found[f"{way} mixed"] == [-3.0, 8.0, 0, Reason.CLEAN]

    def test_one_bad_device_skips_on_all(self, found, way):
        reason = Reason.OVERFLOW if "update" in way else Reason.LOSS_NOT_FINITE
        assert found[f"{way} bad"] == [0.0, 4.0, 1, reason]


def test_pmap(found):
    assert found["pmap large"] == [[-3750.0] * 4, [8.0] * 4, [0] * 4, [Reason.CLEAN] * 4]
    assert found["pmap mixed"] == [[-3.0] * 4, [8.0] * 4, [0] * 4, [Reason.CLEAN] * 4]
    assert found["pmap bad"] == [[0.0] * 4, [4.0] * 4, [1] * 4, [Reason.LOSS_NOT_FINITE] * 4]


MEAN = [6.0, 7.0, 8.0, 9.0]


@pytest.mark.parametrize("vma", ["vma", "no vma"])
class TestParametersSplitOverDevices:
    @pytest.mark.parametrize("form", ["step", "update"])
    @pytest.mark.parametrize("way", ["fsdp", "hsdp"])
    def test_gradients_are_averaged_over_the_replicas_alone(self, found, way, form, vma):
        after, *scaler, momentum, applied = found[f"{way} {vma} {form} good"]
        assert (after, momentum) == ([-g for g in MEAN], MEAN)
        assert (scaler, applied) == ([8.0, 0], [True] * 4)

    @pytest.mark.parametrize("form", ["step", "update"])
    @pytest.mark.parametrize("way", ["fsdp", "hsdp"])
    def test_one_bad_part_skips_all(self, found, way, form, vma):
        zeros = [0.0] * 4
        assert found[f"{way} {vma} {form} bad"] == [zeros, 4.0, 1, zeros, [False] * 4]

    def test_gradients_that_do_not_travel(self, found, vma):
        good = [[0.0, -1.0, -2.0, -3.0], 8.0, 0, [0.0, 1.0, 2.0, 3.0], [True] * 4]
        assert found[f"tp {vma} good"] == good
        assert found[f"tp {vma} bad"] == [[0.0] * 4, 4.0, 1, [0.0] * 4, [False] * 4]


def test_without_an_axis_to_agree_over_devices_decide_apart(found):
    assert found["tp alone bad"][-1] == [True, True, True, False]


@pytest.mark.parametrize(
    ("agree", "loss", "expected"),
    [
        (False, False, {"psum": 1, "pmin": 0, "pmax": 0}),
        (False, True, {"psum": 1, "pmin": 1, "pmax": 0}),
        (True, False, {"psum": 0, "pmin": 1, "pmax": 0}),
        (True, True, {"psum": 0, "pmin": 2, "pmax": 0}),
    ],
)
def test_what_is_equal_everywhere_is_not_agreed_on(found, agree, loss, expected):
    assert found[f"collectives {agree} {loss}"] == list(expected.values())


@pytest.mark.parametrize("form", ["step", "update"])
@pytest.mark.parametrize("axes", ["Auto", "Explicit"])
def test_jit_with_sharded_arrays(found, axes, form):
    case = found[f"jit {axes} {form}"]
    moments = case.pop("moments")
    assert case == {
        "as on one device": True,
        "types stay": True,
        "skipped": 1,
        "compiled": 1,
        "devices": 4,
    }
    assert "'d'" in moments


def test_reduce(found):
    assert found["agreed"] == [0.0, 1.0, 3.0, 0.25]


def test_pmean(found):
    assert found["averaged large"] == [30000.0, 30000.0, 7]
    assert found["averaged mixed"] == [24.0, 24.0, 7]


def test_dynamic_scale(found):
    assert found["dynamic_scale large"] == [True, 8.0, 3750.0]
    assert found["dynamic_scale mixed"] == [True, 8.0, 3.0]
    finite, scale, grad = found["dynamic_scale bad"]
    assert (finite, scale) == (False, 4.0)
    assert grad == float("inf")
