"""`polyamp bench tensorflow-step`: the loops do the same, the rows are complete."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("tensorflow", reason="the bench is about TensorFlow")

from tensorflow_cases import numbers

from polyamp import bench
from polyamp.bench.report import Row
from polyamp_tensorflow import LossScaler, _bench

WIDTHS = (6, 5, 4, 3)


@pytest.mark.parametrize("kind", ["sgd graph 8", "adam xla 8"])
def test_with_and_without_a_scaler_the_step_is_the_same(kind):
    ends = []
    for scaler in (None, LossScaler("keras")):
        problem = _bench.Problem(kind, WIDTHS)
        step = problem.step(scaler)
        losses = [float(step()) for _ in range(3)]
        ends.append((losses, [numbers(v) for v in problem.model.trainable_variables]))
        assert int(problem.optimizer.iterations) == 3
    assert scaler.state.step == 3
    assert ends[0] == ends[1]


def test_rows():
    rows = _bench.measure("adam graph 4", 3, WIDTHS)
    assert [(r.name, r.unit, r.limit) for r in rows] == [
        ("adam graph 4 time", "ms", None),
        ("adam graph 4 ratio", "ratio", 1.05),
        ("adam graph 4 ratio, low", "ratio", None),
        ("adam graph 4 ratio, high", "ratio", None),
    ]
    assert all(row.peer is not None for row in rows)
    low, value, high = rows[2].value, rows[1].value, rows[3].value
    assert 0.0 < low <= value <= high


def test_the_perceptron_has_the_size_that_is_told():
    variables = _bench.Problem("sgd graph 1").model.trainable_variables
    assert sum(v.numpy().size for v in variables) == 1_863_690


def test_each_kind_in_a_process_of_its_own(monkeypatch):
    calls, told = [], []

    def fresh(*arguments):
        calls.append(arguments)
        return [Row("x", 1.0, "ms").__dict__]

    monkeypatch.setattr(_bench, "in_fresh_python", fresh)
    found = bench.BENCHES["tensorflow-step"].load()(True, told.append)
    assert [call[2] for call in calls] == _bench.KINDS
    assert len(told) == len(found.rows) == len(_bench.KINDS) == 8
    assert (found.bench, found.device[:5]) == ("tensorflow-step", "cpu: ")
    assert {"python", "tensorflow", "keras", "polyamp"} <= set(found.versions)


def test_the_process(monkeypatch, capsys):
    monkeypatch.setattr(_bench, "measure", lambda kind, rounds: [Row(kind, rounds, "ms")])
    _bench._main("sgd xla 32", "2")
    assert [Row(**row) for row in json.loads(capsys.readouterr().out)] == [
        Row("sgd xla 32", 2, "ms")
    ]
