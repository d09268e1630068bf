"""Traces: files of every kind, malformed ones, the compact form, made-up and recorded ones."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyamp import PolyampError
from polyamp.simulate.compact import compact, decode, encode
from polyamp.simulate.engine import replay
from polyamp.simulate.expressions import parse_rule
from polyamp.simulate.generate import KINDS, generate
from polyamp.simulate.read import read_trace
from polyamp.simulate.trace import OverflowTrace, RangeTrace, share_at


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


class TestFlags:
    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("a.csv", "0\n1\n0\n"),
            ("a.txt", "0\n\n1\n0"),
            ("a.csv", "step,found_inf\n0,0\n1,1.0\n2,0.0\n"),
            ("a.csv", "\ufeffOverflow\nfalse\nTrue\nFALSE\n"),
            ("a.csv", "finite,loss\n1,2.0\n0,nan\n1,1.0\n"),
            ("a.jsonl", '{"skipped": false}\n\n{"skipped": true}\n{"skipped": 0}\n'),
            ("a.ndjson", '{"finite": 1}\n{"finite": 0}\n{"finite": true}\n'),
        ],
    )
    def test_read(self, tmp_path, name, text):
        trace = read_trace(written(tmp_path, name, text))
        assert isinstance(trace, OverflowTrace)
        assert trace.overflow.tolist() == [False, True, False]

    @given(st.lists(st.booleans(), min_size=1, max_size=30))
    def test_any_flags(self, tmp_path_factory, flags):
        lines = "".join(f'{{"found_inf": {int(f)}}}\n' for f in flags)
        trace = read_trace(written(tmp_path_factory.mktemp("flags"), "a.jsonl", lines))
        assert trace.overflow.tolist() == flags


class TestAmax:
    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("a.csv", "amax,found_inf,inner\n0.5,0,1\nnan,1,0\n,1,\n2e-3,0,0\n"),
            ("a.jsonl", '{"amax": 0.5, "inner": 1}\n{"amax": NaN, "inner": 0}\n'
             '{"amax": null, "inner": null}\n{"amax": "2e-3", "inner": 0}\n'),
        ],
    )  # fmt: skip
    def test_read(self, tmp_path, name, text):
        trace = read_trace(written(tmp_path, name, text))
        assert isinstance(trace, RangeTrace)
        assert trace.amax.tolist() == [0.5, math.inf, math.inf, 2e-3]
        assert trace.largest.tolist() == [1.0, math.inf, math.inf, 2e-3]
        found = replay(parse_rule("static:4"), trace)
        assert (found.skips, found.flushed, found.lost) == (2, None, None)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "a.csv is empty"),
        ("a.csv", "step,loss\n1,2\n", "header must name amax or one of found_inf"),
        ("a.csv", "2\n", "every line be one flag 0 or 1; the first line is '2'"),
        ("a.csv", "0\n2\n", "line 2: overflow must be 0 or 1, got '2'"),
        ("a.csv", "0\n1,1\n", "line 2: 2 columns where 1 are expected"),
        ("a.csv", "amax\n", "a.csv has no steps"),
        ("a.csv", "amax\n1\nbig\n", "line 3: amax must be a number, got 'big'"),
        ("a.csv", "amax\n-1\n", "line 2: amax must not be negative"),
        ("a.jsonl", "\n", "a.jsonl has no steps"),
        ("a.jsonl", '{"amax": 1}\n{', "line 2 is not JSON"),
        ("a.jsonl", "[1]\n", "line 1 is not a JSON object"),
        ("a.jsonl", '{"loss": 1}\n', "line 1: none of amax, found_inf.* it has loss"),
        ("a.jsonl", '{"amax": 1}\n{"loss": 1}\n', "line 2: amax is missing"),
        ("a.jsonl", '{"skipped": 0}\n{"x": 1}\n', "line 2: skipped is missing; it is there in"),
        ("a.jsonl", '{"amax": true}\n', "line 1: amax must be a number, got True"),
        ("a.jsonl", '{"amax": [1]}\n', "line 1: amax must be a number"),
        ("a.jsonl", '{"finite": 1}\n{"finite": null}\n', "line 2: finite must be 0 or 1, got None"),
        ("a.parquet", "x", "a trace is one of .npz, .csv"),
        ("a.npz", "not a zip file", "is not an .npz file of plain arrays"),
    ],
)
def test_malformed(tmp_path, name, text, message):
    with pytest.raises(PolyampError, match=message):
        read_trace(written(tmp_path, name, text))


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PolyampError, match="cannot be read"):
        read_trace(tmp_path / "a.csv")


def full(steps=40, seed=0):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 50, (2, steps, 560)) ** 2 * (rng.random((2, steps, 560)) < 0.2)
    counts[:, :, :280] = 0
    amax = rng.lognormal(size=(2, steps)).astype(np.float32)
    return {
        "AP": amax[0], "AA": amax[1], "LS": amax[0], "HP": counts[0].astype(np.int32),
        "HA": counts[1].astype(np.int32),
    }  # fmt: skip


class TestNpz:
    def saved(self, tmp_path, **changes):
        arrays = {**full(), **changes}
        np.savez(tmp_path / "a.npz", **{k: v for k, v in arrays.items() if v is not None})
        return tmp_path / "a.npz"

    def test_full_and_compact_agree(self, tmp_path):
        wide = read_trace(self.saved(tmp_path))
        np.savez(tmp_path / "b.npz", **compact(full()))
        narrow = read_trace(tmp_path / "b.npz")
        assert (wide.amax == narrow.amax).all()
        assert (wide.inner == narrow.inner).all()
        steps = np.arange(40)
        for bits in range(-30, 40, 3):
            for name in ("below_params", "below_all"):
                shares = [share_at(t, getattr(t, name), steps, bits) for t in (wide, narrow)]
                assert shares[0] == pytest.approx(shares[1], abs=0.03)
                assert shares[0].mean() == pytest.approx(shares[1].mean(), abs=2e-3)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"HA": None}, "HA missing; a trace has AP, AA, HP, HA .*this file has AP, AA, LS, HP"),
            ({"AP": np.ones((40, 2))}, r"AP must be numbers \(steps,\), got float64 \(40, 2\)"),
            ({"AP": np.array(["x"] * 40)}, "AP must be numbers"),
            ({"AA": np.ones(39)}, r"AA must be numbers \(40,\)"),
            ({"AA": -np.ones(40)}, "AA is negative at step 0"),
            ({"HP": np.ones((40, 10), np.int32)}, r"HP must be counts \(40, 560\)"),
            ({"HP": np.ones((40, 560))}, r"HP must be counts \(40, 560\), got float64"),
            ({"HA": -np.ones((40, 560), np.int32)}, "HA has a negative count"),
            ({"AP": np.array([{}], dtype=object)}, "not an .npz file of plain arrays"),
        ],
    )
    def test_malformed(self, tmp_path, changes, message):
        with pytest.raises(PolyampError, match=message):
            read_trace(self.saved(tmp_path, **changes))

    def test_a_compact_file_without_low(self, tmp_path):
        arrays = compact(full())
        del arrays["low"]
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(PolyampError, match="low missing"):
            read_trace(tmp_path / "a.npz")


class TestCompact:
    @given(st.lists(st.integers(0, 2**31), min_size=1, max_size=20))
    def test_codes(self, counts):
        row = np.array([counts])
        back = decode(encode(row))
        assert (back[row <= 32] == row[row <= 32]).all()
        assert (np.abs(back - row) <= 0.045 * row).all()

    def test_means_are_kept(self):
        counts = np.full((1000, 1), 1234)
        back = decode(encode(counts))
        assert abs(back[0, 0] / 1234 - 1) > 0.01
        assert back.mean() == pytest.approx(1234, rel=2e-4)


class TestGenerated:
    @pytest.mark.parametrize("kind", sorted(KINDS))
    def test_the_same_every_time(self, kind):
        one, two = generate(kind), generate(kind)
        assert len(one) == len(two) > 0
        key = "overflow" if isinstance(one, OverflowTrace) else "amax"
        assert (getattr(one, key) == getattr(two, key)).all()

    def test_overflows(self):
        trace = generate("overflows:p=0.01,steps=10000,seed=0")
        assert len(trace) == 10_000
        assert abs(trace.overflow.sum() - 100) < 30
        assert generate("overflows:p=1").overflow.all()

    def test_bursts_and_patterns(self):
        assert generate("bursts:length=2,every=4,steps=6").overflow.tolist() == [0, 0, 1, 1, 0, 0]
        assert generate("pattern:flags=010,steps=5").overflow.tolist() == [0, 1, 0, 0, 1]

    def test_levels(self):
        trace = generate("drift:bits=-20,noise=0,steps=3,level=5")
        assert np.log2(trace.amax).tolist() == [5.0, -5.0, -15.0]
        moved = generate("shifts:bits=-14/20,every=2,noise=0,steps=6")
        assert np.log2(moved.amax).tolist() == [0.0, 0.0, -14.0, -14.0, 6.0, 6.0]
        assert moved.shifts == ((2, -14), (4, 20))

    def test_the_spread_is_a_half_normals_where_its_width_is_0(self):
        trace = generate("stationary:width=0,noise=0,steps=1")  # sigma a quarter of the largest
        share = share_at(trace, trace.below_all, np.array([0]), np.array([-2.0]))
        assert share.item() == pytest.approx(math.erf(1 / math.sqrt(2)))

    def test_outliers(self):
        levels = np.log2(generate("heavy:steps=5000").amax)
        assert levels.max() > 10 > 1 > np.median(np.abs(levels))

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("overflows:p=2", "p must be a number from 0 to 1, got 2"),
            ("overflows:steps=0", "steps must be a whole number from 1"),
            ("overflows:steps=1e3", "steps must be a whole number"),
            ("overflows:level=1", "overflows has no 'level'; it has p, steps, seed"),
            ("overflows:3", "'3' has no key"),
            ("pattern:flags=012", "made of 0 and 1"),
            ("shifts:bits=a/b", "bits must be whole numbers"),
            ("drift:bits=300", "bits must be a number from -200 to 200"),
            ("stationary:noise=true", "noise must be a number"),
            ("stationery", "did you mean 'stationary'"),
        ],
    )
    def test_refused(self, text, message):
        with pytest.raises(PolyampError, match=message):
            generate(text)


class TestRecord:
    @pytest.mark.parametrize(
        "name", ["cnn_clean", "cnn_outlier", "ae_tiny", "tf_spike", "deep_vanish"]
    )
    def test_a_few_steps(self, name):
        for module in ("torch", "sklearn"):
            pytest.importorskip(module, reason="records a real training")
        from polyamp.simulate.record import record

        found = record(name, 3)
        assert {k: v.shape for k, v in found.items()} == {
            "AP": (3,), "AA": (3,), "LS": (3,), "HP": (3, 560), "HA": (3, 560),
        }  # fmt: skip
        for amax, counts in (("AP", "HP"), ("AA", "HA")):
            for size, row in zip(found[amax], found[counts], strict=True):
                assert np.flatnonzero(row)[-1] == math.floor((math.log2(size) + 100) * 4)
        assert found["HP"].sum(axis=1).max() > 10_000
        again = record(name, 3)
        assert all((found[k] == again[k]).all() for k in found)

    def test_a_tiny_loss_has_tiny_gradients(self):
        for module in ("torch", "sklearn"):
            pytest.importorskip(module, reason="records a real training")
        from polyamp.simulate.record import record

        assert 0 < record("ae_tiny", 1)["AP"][0] < 1e-4 < record("cnn_clean", 1)["AP"][0]

    def test_the_command(self, tmp_path, capsys):
        for module in ("torch", "sklearn"):
            pytest.importorskip(module, reason="records a real training")
        from polyamp.simulate import record

        for full_form in ((), ("--full",)):
            path = tmp_path / "a.npz"
            assert record.main(["ae_tiny", str(path), "--steps", "2", *full_form]) == 0
            trace = read_trace(path)
            assert (len(trace), trace.per_octave) == (2, 4 if full_form else 1)
        assert record.main(["nothing", str(path)]) == 2
        assert record.main(["ae_tiny", str(path), "--steps", "0"]) == 2
        assert record.main(["ae_tiny", "a.txt"]) == 2
        told = capsys.readouterr().err.splitlines()
        assert "no training 'nothing'" in told[0]
        assert "1 step or more" in told[1]
        assert "must end in .npz" in told[2]


def test_numbers_of_a_log_are_those_of_its_text(tmp_path):
    amax = [2.0**-130, 0.1, 65504.0]
    text = "".join(json.dumps({"step": i, "amax": a}) + "\n" for i, a in enumerate(amax))
    assert read_trace(written(tmp_path, "run.jsonl", text)).amax.tolist() == amax
