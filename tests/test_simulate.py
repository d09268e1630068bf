"""`polyamp simulate`: the reckoning on known numbers, rules as text, the command."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import polyamp
from polyamp import PolyampError, RuleError, cli
from polyamp.simulate import table
from polyamp.simulate.engine import oracle, replay
from polyamp.simulate.expressions import parse_expression, parse_rule
from polyamp.simulate.generate import generate
from polyamp.simulate.read import SHIPPED, shipped
from polyamp.simulate.trace import OverflowTrace, range_trace

TORCH = parse_rule("torch")


def flags(text):
    return OverflowTrace("flags", np.array([c == "1" for c in text]))


class Probe(polyamp.Static):
    """A static rule that keeps the signals it is shown."""

    wants_amax = True
    sub_interval = 1
    seen: list[polyamp.Signal] = []  # noqa: RUF012

    def bind_change(self, xp):
        change = super().bind_change(xp)

        def keep(state, good, signal):
            self.seen.append(signal)
            return change(state, good, signal)

        return keep


class TestReckoning:
    def test_flags_are_replayed_whatever_the_scale(self):
        rule = polyamp.Dynamic(init_scale=16.0, growth_interval=2)
        found = replay(rule, flags("0011001"))
        assert found.scales.tolist() == [16.0, 16.0, 32.0, 16.0, 8.0, 8.0, 16.0]
        assert found.final_scale == 8.0
        assert (found.skips, found.longest_run, found.bounds) == (3, 2, (8.0, 32.0))
        assert (found.lost, found.flushed, found.median_headroom) == (None, None, None)

    @pytest.mark.parametrize(("amax", "skips"), [(65519.0, 0), (65520.0, 1), (math.inf, 1)])
    def test_where_float16_overflows(self, amax, skips):
        assert replay(polyamp.Static(1.0), range_trace("one", [amax])).skips == skips

    def test_activations_overflow_too(self):
        assert replay(polyamp.Static(2.0), range_trace("one", [1.0], [40000.0])).skips == 1

    def test_what_the_rule_is_shown(self):
        Probe.seen.clear()
        counts = np.array([[1, 2, 4, 8, 16, 32]])  # edges 2**-27 .. 2**-21
        amax = [2.0**-21, 2.0**-40, 1e30, 1.1]
        trace = range_trace("four", amax, None, [np.repeat(counts, 4, 0)] * 2, low=-27)
        replay(Probe(2.0), trace)
        assert [s.finite for s in Probe.seen] == [True, True, False, True]
        assert [s.amax for s in Probe.seen] == [2.0**-20, 0.0, math.inf, float(np.float32(2.2))]
        assert [s.sub for s in Probe.seen[:2]] == [float(np.float32(62 / 63))] * 2

    def test_lost_is_skipped_or_flushed(self):
        counts = [np.array([[1, 3]] * 4), np.array([[5, 1]] * 4)]  # edges 2**-26, 2**-25, 2**-24
        trace = range_trace("four", [1.0, 1.0, 1e9, 1.0], None, counts, low=-26)
        found = replay(polyamp.Static(1.0), trace)
        assert found.flushed == pytest.approx(60.0)
        assert found.lost == pytest.approx(25.0 + 0.75 * 60.0)

    def test_linear_inside_a_bin(self):
        counts = [np.array([[4]]), np.array([[0]])]  # one bin, 2**-25 .. 2**-24
        trace = range_trace("one", [1e-3], None, counts, low=-25)
        assert replay(polyamp.Static(1.0), trace).flushed == 0.0
        assert replay(polyamp.Static(0.5), trace).flushed == 100.0
        expected = 100 * math.log2(1 / 0.75)
        assert replay(polyamp.Static(0.75), trace).flushed == pytest.approx(expected)

    def test_nothing_applied(self):
        trace = range_trace("inf", [math.inf] * 3, None, [np.ones((3, 2), int)] * 2)
        found = replay(polyamp.Static(1.0), trace)
        assert (found.lost, found.median_headroom, found.longest_run) == (100.0, None, 3)

    def test_headroom(self):
        found = replay(polyamp.Static(4.0), range_trace("two", [65520 / 8, 65520 / 64, 1e9]))
        assert found.headroom[:2].tolist() == pytest.approx([1.0, 4.0])
        assert math.isnan(found.headroom[2])
        assert found.median_headroom == pytest.approx(2.5)

    @pytest.mark.parametrize(
        ("text", "steps"), [("0000", 0), ("01000000", 2), ("0110000000", 4), ("0000000010", None)]
    )
    def test_back_up(self, text, steps):
        rule = polyamp.Dynamic(init_scale=2.0, growth_interval=2, min_scale=0.25, max_scale=2.0)
        assert replay(rule, flags(text)).back_up == steps

    def test_recovery(self):
        trace = range_trace("drop", [1.0] * 40 + [2.0**-20] * 60)
        rule = polyamp.Dynamic(init_scale=2.0**15, growth_interval=4)
        found = replay(rule, trace)
        first = next(i for i in range(40, 100) if np.median(found.headroom[i : i + 20]) <= 9.0)
        assert found.recovery(40, 100) == first - 40 == 39
        assert replay(polyamp.Static(1.0), trace).recovery(40, 100) is None

    def test_a_rule_that_gives_up_is_told(self):
        rule = parse_rule("static:1,max_skips_in_a_row=2")
        assert replay(rule, flags("01011011")).fault_step == 4

    def test_the_oracle(self):
        found = oracle(range_trace("four", [65520.0, 65519.0, 1.5, 0.0]))
        assert found.scales.tolist() == [0.5, 1.0, 2.0**15, 2.0**15]
        assert found.skips == 0

    def test_a_rule_that_wants_amax(self):
        with pytest.raises(RuleError, match=r"Predictive goes by .* flags only"):
            replay(parse_rule("auto"), flags("01"))

    def test_no_steps(self):
        with pytest.raises(PolyampError, match="flags has no steps"):
            replay(TORCH, flags(""))


@pytest.fixture(scope="module")
def traces():
    return [shipped(name) for name in SHIPPED]


class TestShipped:
    """The figures that the design states for the full traces."""

    @pytest.mark.parametrize(
        ("rule", "skips", "lost"),
        [
            ("torch", [0, 2, 0, 0, 4], [0.1164, 0.03345, 0.006197, 0.006023, 0.06673]),
            ("auto", [0, 2, 0, 0, 0], [0.008402, 0.03446, 1.477e-05, 0.01005, 0.0001307]),
            ("megatron", [15, 23, 6, 20, 25], [0.275, 0.3834, 0.1, 0.3356, 0.4167]),
            ("fairseq", [0] * 5, [4.705, 0.06476, 2.834, 0.3358, 0.006918]),
            ("dynamic:init_scale=2**12", [0, 0, 0, 0, 1],
             [0.6344, 0.001069, 0.07958, 0.05812, 0.01675]),
        ],
    )  # fmt: skip
    def test_as_in_the_full_traces(self, traces, rule, skips, lost):
        found = [replay(parse_rule(rule), trace) for trace in traces]
        assert [f.skips for f in found] == skips
        assert [f.lost for f in found] == pytest.approx(lost, rel=2e-3, abs=1e-7)

    def test_sums(self, traces):
        for rule, skips, lost in (("torch", 6, 0.229), ("auto", 2, 0.053)):
            found = [replay(parse_rule(rule), trace) for trace in traces]
            assert sum(f.skips for f in found) == skips
            assert round(sum(f.lost for f in found), 3) == lost

    def test_size(self):
        from importlib import resources

        files = [resources.files("polyamp.simulate") / "traces" / f"{n}.npz" for n in SHIPPED]
        assert sum(len(file.read_bytes()) for file in files) < 2_000_000
        assert {len(shipped(name)) for name in SHIPPED} == {6000}

    def test_a_shift_moves_everything(self, traces):
        for bits in (-14, 20):
            moved = traces[0].shifted([(0, bits)])
            same = replay(polyamp.Static(2.0 ** (10 - bits)), moved)
            assert same.lost == replay(polyamp.Static(2.0**10), traces[0]).lost
        with pytest.raises(PolyampError, match="ends at step 5999: no shift at 6000"):
            traces[0].shifted([(6000, 1)])


class TestRules:
    @pytest.mark.parametrize(
        ("text", "rule"),
        [
            ("torch", polyamp.Dynamic.like("torch")),
            (" Keras : growth_interval = 7 ", polyamp.Dynamic.like("keras", growth_interval=7)),
            ("flax:growth_interval=5", polyamp.Dynamic(growth_interval=6)),
            ("dynamic", polyamp.Dynamic()),
            ("dynamic:init_scale=2**16,growth_interval=100", polyamp.Dynamic(growth_interval=100)),
            ("dynamic:2^10,late_first_window=TRUE,threshold=none,at_floor=hold",
             polyamp.Dynamic(init_scale=1024.0, late_first_window=True, at_floor="hold")),
            ("static:1024", polyamp.Static(1024.0)),
            ("static:2**-3", polyamp.Static(0.125)),
            ("auto:guard=2", polyamp.Predictive(guard=2, sub_interval=64)),
            ("predictive:guard=2", polyamp.Predictive(guard=2)),
            ("two-phase:literal=true", polyamp.TwoPhase(literal=True)),
            ("delayed:history=100,margin=3", polyamp.DelayedScaling(history=100, margin=3)),
        ],
    )  # fmt: skip
    def test_read(self, text, rule):
        assert parse_rule(text) == rule

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "is not NAME"),
            (":", "is not NAME"),
            ("static:", "is not NAME"),
            ("torhc", "did you mean 'torch'"),
            ("dynamic:=3", "is not KEY=VALUE"),
            ("dynamic:growth_interval=", "is not KEY=VALUE"),
            ("dynamic:growth_interval=3,4", "'4' is not KEY=VALUE"),
            ("dynamic:growth_interval=3,growth_interval=4", "given twice"),
            ("dynamic:4,init_scale=8", "init_scale is given twice"),
            ("dynamic:growth_intervall=3", "did you mean 'growth_interval'"),
            ("dynamic:foo=1", r"no parameter 'foo'\. It has: init_scale"),
            ("static:growth_interval=3", "Static has no parameter 'growth_interval'"),
            ("static:big", "init_scale must be a number, got 'big'"),
            ("static:0**-1", "not a number"),
            ("static:2**-999", "between 2\\*\\*-126"),
            ("static:99**999", "between 2\\*\\*-126"),
            ("static:nan", "between 2\\*\\*-126"),
            ("dynamic:growth_interval=1.5", "must be an integer"),
            ("torch:hysteresis=true", "must be an integer"),
        ],
    )
    def test_refused(self, text, message):
        with pytest.raises(RuleError, match=message):
            parse_rule(text)

    @given(st.text(alphabet="dynamicstorch:=,*^.-+ 0129e_", max_size=30))
    def test_any_text_is_a_rule_or_a_rule_error(self, text):
        try:
            assert isinstance(parse_rule(text), polyamp.Rule)
        except RuleError:
            assert text != "torch"

    WORD = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)

    @given(WORD, st.none() | WORD, st.dictionaries(WORD, WORD, max_size=4))
    def test_what_is_put_together_is_taken_apart(self, name, first, values):
        parts = [*([first] if first else []), *(f"{k}={v}" for k, v in values.items())]
        text = name + (":" + ",".join(parts) if parts else "")
        assert parse_expression(text) == (text, name, first, values)

    @given(st.integers(-60, 60), st.integers(1, 10**6))
    def test_numbers_are_read_back(self, exponent, interval):
        expected = polyamp.Dynamic(init_scale=2.0**exponent, growth_interval=interval)
        text = f"dynamic:init_scale={2.0**exponent!r},growth_interval={interval}"
        assert parse_rule(text) == expected
        assert parse_rule(f"dynamic:2**{exponent},growth_interval={interval}") == expected


class TestCommand:
    def run(self, capsys, *arguments):
        status = cli.main(["simulate", *arguments])
        return status, *capsys.readouterr()

    def test_json(self, capsys):
        status, out, _ = self.run(
            capsys, "--generate", "pattern:flags=01,steps=4", "--rule", "dynamic:8", "--json"
        )
        assert status == 0
        assert json.loads(out) == {
            "simulate": [
                {
                    "trace": "pattern:flags=01,steps=4",
                    "kind": "overflows",
                    "steps": 4,
                    "rules": [
                        {
                            "rule": "dynamic:8",
                            "final_scale": 2.0,
                            "min_scale": 2.0,
                            "max_scale": 8.0,
                            "skips": 2,
                            "lost_percent": None,
                            "flushed_percent": None,
                            "median_headroom_bits": None,
                            "longest_run_of_skips": 1,
                            "steps_back_up": None,
                            "fault_step": None,
                        }
                    ],
                }
            ]
        }

    def test_table_of_overflows(self, capsys):
        status, out, _ = self.run(
            capsys, "--generate", "pattern:flags=01,steps=4", "--rule", "dynamic:8",
            "--rule", "static:1,max_skips_in_a_row=1",
        )  # fmt: skip
        assert status == 0
        lines = out.splitlines()
        assert "replayed as recorded, whatever the scale" in lines[0]
        assert " ".join(lines[2].split()) == "rule final lowest highest skips in a row back up"
        assert lines[3].split() == ["dynamic:8", "2**1", "2**1", "2**3", "2", "1", "never"]
        assert "static:1,max_skips_in_a_row=1 gives up at step 1; the replay goes on." in lines

    def test_shifted_ranges_and_the_defaults(self, capsys):
        status, out, _ = self.run(
            capsys, "--generate", "stationary:steps=200", "--shift", "100:-14", "--json"
        )
        (trace,) = json.loads(out)["simulate"]
        assert status == 0
        assert [r["rule"] for r in trace["rules"]][:2] == ["auto", "torch"]
        auto, torch = trace["rules"][:2]
        assert auto["final_scale"] > 2.0**25 > torch["final_scale"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((), "nothing to replay"),
            (("--trace", "tf_spkie"), "did you mean 'tf_spike'"),
            (("--generate", "drft"), "did you mean 'drift'"),
            (("--generate", "bursts", "--rule", "auto"), "only has overflows"),
            (("--generate", "bursts", "--shift", "1:1"), "bursts has overflows"),
            (("--generate", "drift", "--shift", "1"), "STEP:BITS"),
            (("--generate", "drift", "--plot", "a.gif"), "must end in .html, .svg, .png"),
            (("--generate", "drift", "--plot", "no/where.svg"), "there is no folder no"),
        ],
    )
    def test_errors(self, capsys, arguments, message):
        status, out, error = self.run(capsys, *arguments)
        assert (status, out) == (2, "")
        assert error.startswith("polyamp simulate: ")
        assert message in error

    @pytest.mark.parametrize("ending", ["svg", "html"])
    def test_plots(self, capsys, tmp_path, ending):
        from xml.etree import ElementTree

        path = tmp_path / f"plot.{ending}"
        self.run(
            capsys, "--generate", "pattern:flags=0001,steps=40", "--generate",
            "drift:steps=30,level=-5", "--rule", "torch", "--rule", "dynamic:4",
            "--plot", str(path),
        )  # fmt: skip
        text = path.read_text(encoding="utf-8")
        drawing = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
        tags = [element.tag.rpartition("}")[2] for element in drawing.iter()]
        assert tags.count("polyline") == 4
        assert tags.count("circle") == 20
        assert ("<pre>" in text) is (ending == "html")

    def test_png_without_matplotlib(self, capsys, monkeypatch, tmp_path):
        import importlib.util

        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        path = str(tmp_path / "a.png")
        status, _, error = self.run(capsys, "--generate", "drift", "--plot", path)
        assert status == 2
        assert "needs matplotlib" in error

    def test_png(self, capsys, tmp_path):
        pytest.importorskip("matplotlib", reason="the .png is drawn with matplotlib")
        path = tmp_path / "a.png"
        self.run(capsys, "--generate", "drift:steps=30", "--rule", "torch", "--plot", str(path))
        assert path.read_bytes()[:4] == b"\x89PNG"


def test_sparklines_share_their_bounds():
    trace = generate("pattern:flags=1,steps=3")
    found = {name: replay(parse_rule(name), trace) for name in ("dynamic:16", "static:4")}
    assert table.sparklines(found, "utf-8") == [
        "log2 of the scale, from 2.0 (▁) to 4.0 (█):",
        "dynamic:16  █▅▁",
        "static:4    ▁▁▁",
    ]
    assert table.sparklines(found, "ascii")[1] == "dynamic:16  #=_"
