"""The closed-loop bench: a tiny loss in float16 trains where it is scaled."""

from __future__ import annotations

import pytest

from polyamp import Static
from polyamp_torch import _bench_closed


def test_a_tiny_loss_trains_as_in_float32_where_it_is_scaled():
    full = _bench_closed.train(None, seed=0, steps=400)
    ours = _bench_closed.train("auto", seed=0, steps=400)
    bare = _bench_closed.train(Static(1.0), seed=0, steps=400)
    assert ours.loss == pytest.approx(full.loss, rel=0.02)
    assert bare.loss > 10 * full.loss
    assert (ours.skipped, bare.skipped) == (0, 0)
    assert ours.scale >= 2.0**40


def test_rows_hold_the_rule_to_its_limit(monkeypatch):
    monkeypatch.setattr(_bench_closed, "RULES", {"float32": None, "auto": "auto"})
    told = []
    report = _bench_closed.closed_loop(True, told.append)
    names = [f"{rule}, {what}" for rule in ("float32", "auto") for what in ROWS]
    assert [row.name for row in report.rows] == names
    assert [row.limit for row in report.rows] == [None] * 4 + [1.02, None]
    assert len(told) == 2


ROWS = ("final loss", "over float32", "skipped")
