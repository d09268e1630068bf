"""`polyamp bench jax-step`: every way trains alike, rows and limits are those promised."""

from __future__ import annotations

import importlib.util

import pytest

pytest.importorskip("jax", reason="these tests are about JAX")

import jax

from polyamp.bench import BENCHES
from polyamp_jax import _bench, _bench_model

INSTALLED = importlib.util.find_spec("jmp") is not None


@pytest.mark.parametrize("name", ["polyamp", "flax", "jmp"])
def test_every_way_is_the_same_training(name):
    made = _bench.ways()
    if name not in made:
        pytest.skip("jmp is not installed")
    ends = []
    for way in (made["plain"], made[name]):
        state, jitted = way.start(), way.jitted()
        for _ in range(3):
            *state, loss = jitted(*state, *_bench_model.batch(16))
        ends.append((state[0], float(loss)))
    (plain, loss), (params, found) = ends
    assert found == pytest.approx(loss, abs=1e-5)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(params), strict=True):
        assert float(abs(a - b).max()) < 1e-4


def test_rows_of_time():
    large, small = _bench.time_rows(128, 2), _bench.time_rows(16, 2)
    limits = {row.name: row.limit for row in (*large, *small) if row.limit is not None}
    assert limits["batch 128, ratio"] == 1.06
    overhead = small[-1]
    assert overhead.name == "batch 16, overhead"
    assert overhead.limit == pytest.approx(0.5 * overhead.peer)
    assert {f"batch 16, ratio of {peer}" for peer in ("flax",)} <= {row.name for row in small}


def test_memory_and_compilations_are_within_their_limits():
    rows = _bench.exact_rows()
    assert [row.name for row in rows] == [
        "batch 128, temporaries",
        "batch 16, temporaries",
        "compilations",
    ]
    assert [row.limit for row in rows] == [1.5, 1.5, 1]
    assert all(row.ok for row in rows)
    assert all(row.peer > 10.0 for row in rows[:2])


def test_jmp_may_be_missing(monkeypatch):
    monkeypatch.setattr(_bench, "in_fresh_python", lambda *arguments: [])
    monkeypatch.setattr(_bench, "exact_rows", list)
    monkeypatch.setattr(_bench.importlib.util, "find_spec", lambda name: None)
    told = []
    report = BENCHES["jax-step"].load()(True, told.append)
    assert "jmp" not in report.versions
    assert report.notes[-1] == "jmp is not installed: its rows are missing."
    assert told[0] == "jax-step: batches of 128, 60 rounds of 3 ways"
    assert report.device.startswith("cpu: ")


def test_the_device_is_the_one_jax_uses(monkeypatch):
    class Gpu:
        platform, id, device_kind = "gpu", 1, "NVIDIA H200"

    cpus, gpus = jax.local_devices(backend="cpu"), [Gpu()]
    monkeypatch.setattr(jax, "devices", lambda *names: gpus)
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: cpus if backend else gpus)
    assert _bench.device() == "cuda:1: NVIDIA H200"
