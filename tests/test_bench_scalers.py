"""`polyamp bench scalers`: the figures the design states, limits, --trace."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest

import polyamp
from polyamp import PolyampError, bench, cli
from polyamp.bench import scalers
from polyamp.simulate.expressions import parse_rule
from polyamp.simulate.generate import generate
from polyamp.simulate.read import SHIPPED, shipped


@pytest.fixture(scope="module")
def figures():
    """The figures of some rules, one seed, no window."""
    traces = [shipped(name) for name in SHIPPED]
    rules = ("auto", "torch", "delayed:history=100,margin=3", "two-phase:literal=true")
    return {
        name: scalers._figures(parse_rule(name), traces, range(1), quick=True) for name in rules
    }


def test_torchs_default(figures):
    torch = figures["torch"]
    assert (torch.skips, round(torch.lost, 3)) == (6, 0.229)
    assert torch.down == scalers.REGIME
    assert torch.up == 18
    assert torch.shifted > 3.0


def test_auto_keeps_its_limits(figures):
    auto = figures["auto"]
    assert (auto.skips, round(auto.lost, 3)) == (2, 0.053)
    assert auto.shifted <= scalers.SHIFTED_LIMIT
    assert auto.down <= scalers.DOWN_LIMIT
    assert auto.up <= scalers.UP_LIMIT


def test_the_other_rules(figures):
    assert figures["delayed:history=100,margin=3"].down == 91
    assert figures["two-phase:literal=true"].lost > 30.0


def test_the_window_is_found_at_both_edges():
    rule, trace = polyamp.Static(1.0), generate("stationary:level=0,noise=0,width=1,steps=4")
    lost = {
        bits: scalers._lost(scalers.replay(rule, trace.shifted([(0, bits)])))
        for bits in range(-40, 40)
    }
    inside = [bits for bits, share in lost.items() if share <= 1.0]
    assert max(inside) == 15
    assert scalers.window(rule, trace) == max(inside) - min(inside)
    assert scalers.window(polyamp.Static(2.0**20), trace) == 0


@pytest.fixture
def two_rules(monkeypatch):
    monkeypatch.setattr(scalers, "OWN", ("auto",))
    monkeypatch.setattr(polyamp, "presets", lambda: {"torch": polyamp.Dynamic.like("torch")})


def test_the_command(two_rules, tmp_path, capsys):
    for i in range(2):
        counts = np.ones((50, 560), np.int32)
        amax = np.full(50, 2.0**i)
        np.savez(tmp_path / f"t{i}.npz", AP=amax, AA=amax, HP=counts, HA=counts)
    status = cli.main(["bench", "scalers", "--quick", "--json", "--trace", str(tmp_path)])
    report = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in report["rows"]}
    assert status == 0
    assert report["ok"] is True
    assert rows["oracle: skips"]["value"] == 0
    assert rows["auto: skips"]["limit"] is None  # the limit is for the shipped traces
    assert rows["auto: down"]["limit"] == 6
    assert rows["torch: skips"]["value"] == 3  # one where amax is 1, two where it is 2
    assert "torch: window" not in rows


def test_the_table(two_rules, capsys):
    status = cli.main(["bench", "scalers", "--quick", "--trace", "ae_tiny"])
    out = capsys.readouterr().out
    assert status == 0
    for text in ("rule    skips", "oracle", "auto", "> 1500", "auto: up", "Traces: ae_tiny"):
        assert text in out
    assert "torch: lost" not in out


def test_a_missed_limit():
    figures = {"torch": scalers.Figures(1, 1.0), "auto": scalers.Figures(3, 0.05, 0.2, 7, 4, 80)}
    rows = scalers._rows("auto", figures["auto"], scalers._auto_limits(shipped=True), figures)
    assert {row.name: row.ok for row in rows} == {
        "auto: skips": False,
        "auto: lost": True,
        "auto: shifted": False,
        "auto: down": False,
        "auto: up": False,
        "auto: window": True,
        "auto: bits short of a window of 90": False,
    }


def test_refused(tmp_path):
    (tmp_path / "a.csv").write_text("0\n1\n")
    (tmp_path / "b.csv").write_text("amax\n1\n")
    for name in ("a.csv", "b.csv"):
        with pytest.raises(PolyampError, match="has no histograms"):
            scalers.scalers(True, print, [str(tmp_path / name)])
    with pytest.raises(PolyampError, match=r"there is no \.npz file in"):
        scalers.scalers(True, print, [str(tmp_path)])
    args = argparse.Namespace(name="core", json=False, quick=True, trace=["a.npz"])
    with pytest.raises(PolyampError, match="bench core takes no --trace"):
        bench.run(args)
