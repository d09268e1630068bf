"""`polyamp bench`: statistics on known numbers, the JSON contract, exit status, sync counting."""

from __future__ import annotations

import argparse
import builtins
import json
import math
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyamp import BackendError, PolyampError, bench, cli
from polyamp.bench import core, harness
from polyamp.bench.report import Report, Row, text_table
from polyamp.bench.shapes import resnet50_shapes

KEPT = Row("fine", 1.5, "ms", 2.0, 3.0)
MISSED = Row("bad", 3.5, "ms", 2.0, 3.0)
INFORMS = Row("told", 7.0, "count")


def report(*rows):
    return Report("fake", "cpu: one", {"python": "3"}, rows, ("a note",))


@pytest.fixture
def fake(monkeypatch):
    """`fake(*rows)` makes `polyamp bench fake` report those rows; returns the calls made."""

    def install(*rows):
        calls = []
        module = types.ModuleType("fake_bench")

        def function(quick, tell):
            calls.append(quick)
            tell("working")
            return report(*rows)

        module.function = function
        monkeypatch.setitem(sys.modules, "fake_bench", module)
        monkeypatch.setitem(bench.BENCHES, "fake", bench.Bench("fake_bench", "function", "a fake"))
        return calls

    return install


class TestStatistics:
    def test_every_round_runs_every_case_once_in_some_order(self):
        log = []

        def case(name):
            return lambda: log.append(name) or float(len(log))

        times = harness.interleaved({n: case(n) for n in "abc"}, rounds=20, warmup=2)
        rounds = [log[i : i + 3] for i in range(0, len(log), 3)]
        assert len(rounds) == 22
        assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
        assert len({tuple(r) for r in rounds}) == 6
        for name in "abc":
            expected = [float(3 * i + r.index(name) + 1) for i, r in enumerate(rounds)]
            assert times[name] == expected[2:]

    def test_the_orders_are_the_same_every_time(self):
        logs = []
        for _ in range(2):
            logs.append([])
            cases = {n: lambda n=n: logs[-1].append(n) or 1.0 for n in "abc"}
            harness.interleaved(cases, rounds=5, warmup=0)
        assert logs[0] == logs[1]

    @pytest.mark.parametrize("rounds", [0, -1])
    def test_no_rounds(self, rounds):
        with pytest.raises(PolyampError, match=f"1 round or more, got {rounds}"):
            harness.interleaved({"a": lambda: 1.0}, rounds)

    def test_the_ratio_is_taken_within_the_round(self):
        peer = [1.0, 1.0, 1.0, 50.0, 50.0]  # the machine slowed down
        ours = [1.1, 1.1, 1.1, 55.0, 55.0]
        found = harness.ratio(ours, peer)
        assert found == pytest.approx((1.1, 1.1, 1.1))

    def test_single_disturbed_rounds_go_by(self):
        ours, peer = [1.2] * 9, [1.0] * 9
        ours[3], peer[7] = 99.0, 99.0
        assert harness.ratio(ours, peer).value == pytest.approx(1.2)

    def test_the_correction_divides_by_the_peers_ratio_to_itself(self):
        rounds = [1.0, 2.0, 4.0, 3.0]
        found = harness.corrected_ratio(
            [1.25 * r for r in rounds], rounds, [1.0625 * r for r in rounds]
        )
        assert found == pytest.approx((20 / 17,) * 3)

    def test_the_quotient_of_medians_not_the_median_of_quotients(self):
        found = harness.corrected_ratio([1.0, 2.0, 9.0], [1.0, 1.0, 1.0], [4.0, 1.0, 1.0])
        assert found.value == 2.0

    def test_unequal_rounds(self):
        with pytest.raises(ValueError, match="shorter"):
            harness.corrected_ratio([1.0, 1.0], [1.0, 1.0], [1.0])

    def test_interval_of_a_median_is_near_the_exact_one(self):
        # Binomial(99, 1/2): order statistics 40 and 60 cover the median with 95.6 %.
        ranks = [float(i) for i in range(1, 100)]
        found = harness.ratio(ranks, [1.0] * 99)
        assert found.value == 50.0
        assert abs(found.low - 40.0) <= 1.0
        assert abs(found.high - 60.0) <= 1.0

    @given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=20))
    def test_the_interval_is_repeatable_and_holds_the_value(self, ratios):
        ones = [1.0] * len(ratios)
        found = harness.ratio(ratios, ones)
        assert found == harness.ratio(ratios, ones)
        assert min(ratios) <= found.low <= found.value <= found.high <= max(ratios)


class TestReport:
    @pytest.mark.parametrize(
        ("value", "limit", "ok"),
        [
            (1.0, None, True),
            (1.0, 1.0, True),
            (1.01, 1.0, False),
            (math.nan, 1.0, False),
            (0, 0, True),
        ],
    )
    def test_limits(self, value, limit, ok):
        assert Row("x", value, "ms", limit=limit).ok is ok

    def test_one_missed_limit_is_enough(self):
        assert report(KEPT, INFORMS).ok
        assert not report(KEPT, MISSED, INFORMS).ok

    def test_json(self):
        assert json.loads(report(KEPT, MISSED).to_json()) == {
            "bench": "fake",
            "device": "cpu: one",
            "versions": {"python": "3"},
            "rows": [
                {"name": "fine", "value": 1.5, "unit": "ms", "peer": 2.0, "limit": 3.0, "ok": True},
                {"name": "bad", "value": 3.5, "unit": "ms", "peer": 2.0, "limit": 3.0, "ok": False},
            ],
            "ok": False,
        }

    def test_what_is_not_finite_is_null(self):
        row = json.loads(report(Row("x", math.nan, "ms", math.inf, 1.0)).to_json())["rows"][0]
        assert (row["value"], row["peer"], row["limit"], row["ok"]) == (None, None, 1.0, False)

    def test_plain_table(self):
        assert text_table([KEPT, MISSED, INFORMS]) == [
            "measured  value  unit    peer  limit  ok",
            "fine      1.500  ms     2.000      3  yes",
            "bad       3.500  ms     2.000      3  MISSED",
            "told          7  count",
        ]


class TestCommand:
    def test_json_alone_on_stdout(self, fake, capsys):
        calls = fake(KEPT, INFORMS)
        assert cli.main(["bench", "fake", "--json"]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out) == report(KEPT, INFORMS).to_dict()
        assert err == "working\n"
        assert calls == [False]

    def test_a_missed_limit_is_exit_status_1(self, fake, capsys):
        calls = fake(KEPT, MISSED)
        assert cli.main(["bench", "fake", "--quick"]) == 1
        assert "MISSED" in capsys.readouterr().out
        assert calls == [True]

    def test_table_without_rich(self, fake, capsys, monkeypatch):
        real = builtins.__import__

        def no_rich(name, *args, **kwargs):
            if name.partition(".")[0] == "rich":
                raise ImportError(name)
            return real(name, *args, **kwargs)

        fake(KEPT)
        monkeypatch.setattr(builtins, "__import__", no_rich)
        assert cli.main(["bench", "fake"]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "fake on cpu: one (python 3)",
            "",
            *text_table([KEPT]),
            "",
            "a note",
        ]

    def test_table_with_rich(self, fake, capsys):
        pytest.importorskip("rich", reason="the table is drawn with rich")
        fake(KEPT, MISSED)
        assert cli.main(["bench", "fake"]) == 1
        out = capsys.readouterr().out
        for text in ("fake on cpu: one", "measured", "1.500", "2.000", "MISSED", "a note"):
            assert text in out

    def test_unknown_name(self, capsys):
        assert cli.main(["bench", "torch-stop"]) == 2
        error = capsys.readouterr().err
        for text in ("no bench 'torch-stop'", "core", "did you mean 'torch-step'?"):
            assert text in error

    def test_missing_framework(self, capsys, monkeypatch):
        absent = bench.Bench("no_such_framework.bench", "f", "", needs="no_such_framework")
        monkeypatch.setitem(bench.BENCHES, "absent", absent)
        assert cli.main(["bench", "absent"]) == 2
        assert "needs no_such_framework" in capsys.readouterr().err

    def test_a_broken_module_is_not_called_missing(self, monkeypatch):
        broken = bench.Bench("no_such_module", "f", "", needs="torch")
        monkeypatch.setitem(bench.BENCHES, "broken", broken)
        args = argparse.Namespace(name="broken", json=True, quick=True)
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            bench.run(args)

    def test_importing_it_imports_nothing_heavy(self):
        code = "import sys, polyamp.bench; print(sorted({'torch', 'numpy', 'rich', 'json', "
        code += "'argparse', 'subprocess'} & set(sys.modules)))"
        assert harness.in_fresh_python("-c", code) == []


class TestFreshPython:
    def test_its_value(self):
        code = "import json, polyamp; print(json.dumps([polyamp.__version__, 2.5]))"
        assert harness.in_fresh_python("-c", code) == [bench_version(), 2.5]

    @pytest.mark.parametrize("code", ["raise SystemExit('lost it')", "print('lost it')"])
    def test_failure_tells_what_the_process_said(self, code):
        with pytest.raises(BackendError, match="lost it"):
            harness.in_fresh_python("-c", code)

    def test_not_from_the_current_directory(self, tmp_path, monkeypatch):
        (tmp_path / "here_only.py").write_text("x = 1")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(BackendError, match="No module named 'here_only'"):
            harness.in_fresh_python("-c", "import here_only")


def bench_version():
    import polyamp

    return polyamp.__version__


class TestCore:
    def test_import_rows(self):
        time, foreign = core.import_rows(1)
        assert (time.name, time.unit, time.limit) == ("import polyamp", "ms", 60.0)
        assert time.value > 0.0
        assert time.peer > 0.0
        assert (foreign.value, foreign.limit, foreign.unit) == (0, 0, "count")

    def test_a_foreign_import_is_seen(self, monkeypatch):
        monkeypatch.setattr(
            core, "_IMPORT", core._IMPORT.replace("import {package}", "import numpy")
        )
        foreign = core.import_rows(1)[1]
        assert foreign.value == 1
        assert "numpy" in foreign.name
        assert not foreign.ok

    def test_transition_rows(self):
        rows = core.transition_rows(1)
        assert [(r.name, r.unit, r.limit) for r in rows] == [
            ("Dynamic, clean transition", "us", 10.0),
            ("Dynamic, overflow transition", "us", 10.0),
            ("Predictive, clean transition", "us", 20.0),
            ("Predictive, overflow transition", "us", 20.0),
        ]
        assert all(row.value > 0.0 and row.peer > 0.0 for row in rows)


class TestShapes:
    def test_resnet50(self):
        shapes = resnet50_shapes()
        assert len(shapes) == 161
        assert sum(math.prod(shape) for shape in shapes) == 25_557_032
        assert shapes[:3] == [(64, 3, 7, 7), (64,), (64,)]
        assert shapes[-2:] == [(1000, 2048), (1000,)]
        assert sum(len(shape) == 4 for shape in shapes) == 53
