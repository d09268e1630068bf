"""`polyamp verify` on the toy backend, on wrong ones and on one that dies."""

from __future__ import annotations

import builtins
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polyamp import BackendError, PolyampError, cli
from polyamp.bench.harness import fresh_environment
from polyamp.testing import every_rule, random_signals
from polyamp.testing._conformance import Plan, Row
from polyamp.testing._traces import Difference, expected, first_difference, stacked
from polyamp.verify import page, report, runner

TOY = "from polyamp_toy import *\nimport polyamp_toy\nimport numpy as np\n"
WRONG = (
    TOY
    + """
NAME = "wrong"

def replay(rule, sequences, mode, device):
    found = polyamp_toy.replay(rule, sequences, mode, device)
    for state in found:
        if len(state.clean) > 100 and rule.init_scale == 512.0:
            state.loss_scale[41] = np.float32(3.0)
    return found

def toy_train(training):
    if training.dtype == "bfloat16":
        raise RuntimeError("no bfloat16 on\\nthis device")
    return polyamp_toy.toy_train(training)
"""
)
DYING = "import os\nos.write(2, b'out of luck\\n')\nos._exit(7)\n"
CHATTY = TOY + "import os\nNAME = 'chatty'\nprint('hello')\nos.system('echo from below')\n"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends toy, wrong, dying and chatty beside polyamp's own."""
    info = tmp_path / "more-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: more\nVersion: 1.0\n")
    points = ["toy = polyamp_toy", *(f"{n} = polyamp_{n}" for n in ("wrong", "dying", "chatty"))]
    (info / "entry_points.txt").write_text("\n".join(["[polyamp.backends]", *points, ""]))
    for name, source in (("wrong", WRONG), ("dying", DYING), ("chatty", CHATTY)):
        (tmp_path / f"polyamp_{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()


def verified(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict]:
    status = cli.main(["verify", "--quick", "--json", *arguments])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("installed")
class TestCommand:
    def test_a_backend_that_does_as_the_core(self, capsys, tmp_path: Path) -> None:
        file = tmp_path / "page.html"
        status, found = verified(capsys, "--backend", "toy", "--html", str(file))
        assert (status, found["ok"], found["differences"]) == (0, True, 0)
        assert {row["check"] for row in found["rows"]} == {
            "golden traces",
            "random signals",
            "training float32",
            "training float16",
            "training bfloat16",
            "unscale exactly",
            "one NaN",
            "skip leaves no trace",
            "resume",
            "hand-over",
        }
        golden = [row for row in found["rows"] if row["check"] == "golden traces"]
        assert [row["steps"] for row in golden] == [80] * 17
        rules = [r for r in found["rows"] if r["check"] == "random signals"]
        assert [row["rule"] for row in rules] == list(every_rule())
        assert {row["steps"] for row in rules} == {200}
        text = file.read_text()
        assert text.count("<tr") == len(found["rows"]) + 1
        assert "0 differences" in text

    def test_a_difference_and_an_error_are_rows(self, capsys, tmp_path: Path) -> None:
        status, found = verified(capsys, "--backend", "wrong", "--backend", "toy")
        assert (status, found["ok"]) == (1, False)
        wrong = [row for row in found["rows"] if not row["ok"]]
        assert {row["backend"] for row in wrong} == {"wrong"}
        different, *raised = wrong
        assert (different["rule"], different["steps"]) == ("static 512", 41)
        assert different["difference"] == {
            "step": 42,
            "field": "loss_scale",
            "expected": "512.0",
            "got": "3.0",
        }
        assert {row["check"] for row in raised} == {"training bfloat16"}
        assert {r["error"] for r in raised} == {"RuntimeError: no bfloat16 on this device"}

    def test_a_process_that_dies_is_a_row_and_the_others_go_on(self, capsys) -> None:
        status, found = verified(capsys, "--backend", "dying", "--backend", "chatty")
        assert status == 1
        (died,) = [row for row in found["rows"] if not row["ok"]]
        assert died["backend"] == "dying"
        assert "exit status 7" in died["error"]
        assert "out of luck" in died["error"]
        assert sum(row["backend"] == "chatty" for row in found["rows"]) > 40

    def test_the_table(self, capsys) -> None:
        arguments = ["verify", "--quick", "--random", "150", "--backend", "wrong"]
        assert cli.main(arguments) == 1
        out, err = capsys.readouterr()
        assert "static 512" in out
        assert "DIFFERS at step 42, loss_scale: expected 512.0, got 3.0" in out
        assert re.search(r"[1-9]\d* of \d+ rows differ", out)
        assert "wrong: " in err

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["--backend", "toi"], "did you mean 'toy'?"),
            (["--random", "0"], "--random must be 1 or more"),
            (["--seed", "-1"], "--seed 0 or more"),
            (["--backend", "toy", "--html", "/nowhere/at/all.html"], "cannot write --html"),
        ],
    )
    def test_bad_arguments_are_refused_before_anything_runs(self, arguments, told, capsys) -> None:
        assert cli.main(["verify", *arguments]) == 2
        assert told in capsys.readouterr().err


STUCK = """
import os, subprocess, time
from pathlib import Path

inner = subprocess.Popen(["sleep", "60"])
file = Path(__file__).with_name("pids")
file.with_suffix(".new").write_text(f"{os.getpid()} {inner.pid}")
file.with_suffix(".new").rename(file)
time.sleep(60)
"""
"""A backend that starts a process of its own and never ends."""


def waited_for(condition) -> bool:
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def runs(pid: str) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return bool(Path("/proc", pid, "cmdline").read_bytes())
    except OSError:
        return False


HEEDING = """
import signal, sys
from polyamp import cli

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.exit(cli.main(sys.argv[1:]))
"""
"""The command, where a shell in the background or nohup would have signals ignored."""


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc")
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_the_command_and_its_processes(tmp_path: Path, number, status) -> None:
    (tmp_path / "polyamp_dying.py").write_text(STUCK)
    command = [sys.executable, "-P", "-c", HEEDING, "verify", "--backend", "dying"]
    with subprocess.Popen(
        [*command, "--html", str(tmp_path / "new.html")],
        stderr=subprocess.PIPE,
        text=True,
        env=fresh_environment(),
        start_new_session=True,
    ) as process:
        assert waited_for((tmp_path / "pids").exists)
        pids = (tmp_path / "pids").read_text().split()
        assert not (tmp_path / "new.html").exists()
        start = time.monotonic()
        os.kill(process.pid, number)
        _, told = process.communicate(timeout=20)
        assert time.monotonic() - start < 10
    assert process.returncode == status
    assert ("interrupted" in told) == (number == signal.SIGINT)
    assert waited_for(lambda: not any(map(runs, pids)))
    assert not (tmp_path / "new.html").exists()


def test_whether_a_page_can_be_written_is_seen_without_writing_it(tmp_path: Path) -> None:
    link = tmp_path / "link.html"
    link.symlink_to(tmp_path / "real.html")
    page.check(str(link))
    assert link.is_symlink()
    assert not (tmp_path / "real.html").exists()
    for wrong in (tmp_path, tmp_path / "no" / "page.html"):
        with pytest.raises(PolyampError, match="cannot write --html"):
            page.check(str(wrong))


class TestWorkers:
    def test_keras_has_one_for_each_of_its_backends(self, monkeypatch) -> None:
        monkeypatch.delenv("KERAS_BACKEND", raising=False)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: name != "jax" or None)
        labels = [worker.label for worker in runner.workers(["keras", "torch"])]
        assert labels == ["keras (tensorflow)", "keras (torch)", "torch"]
        with pytest.raises(BackendError, match="needs jax, which is not installed"):
            runner.workers(["jax"])

    def test_the_environment_may_choose_one(self, monkeypatch) -> None:
        monkeypatch.setenv("KERAS_BACKEND", "jax")
        monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
        (worker,) = runner.workers(["keras"])
        assert worker == ("keras", "keras (jax)", {"KERAS_BACKEND": "jax"})


class TestTraces:
    def test_random_signals_are_the_same_for_the_same_seed(self) -> None:
        rule = every_rule()["dynamic"]
        one, two, other = (random_signals(rule, seed, 500) for seed in (1, 1, 2))
        assert one == two
        assert one != other
        assert one.amax is None
        assert 50 < one.finite.count(False) < 300
        assert 0 < one.loss_finite.count(False) < 100

    def test_random_amax_has_every_kind(self) -> None:
        class Wants(type(every_rule()["dynamic"])):  # type: ignore[misc]
            wants_amax = True

        signals = random_signals(Wants(), 0, 2000)
        good = [a for a, f in zip(signals.amax, signals.finite, strict=True) if f]
        assert {0.0, 2.0**-140} <= set(good)
        assert max(good) > 2.9e38
        assert sum(2.0**-60 <= a <= 2.0**60 for a in good) > 0.9 * len(good)
        bad = [a for a, f in zip(signals.amax, signals.finite, strict=True) if not f]
        assert any(a != a for a in bad)
        assert any(a < 2.0**61 for a in bad)

    def test_every_rule_changes_its_scale_in_a_short_trace_unless_it_is_static(self) -> None:
        for name, rule in every_rule().items():
            found = {s.loss_scale for s in expected(rule, random_signals(rule, 0, 200))}
            assert (len(found) == 1) == name.startswith("static"), name

    def test_the_first_difference_is_found_in_any_field(self) -> None:
        rule = every_rule()["window"]
        want = expected(rule, random_signals(rule, 0, 30))
        assert first_difference(stacked(want), want) is None
        wrong = list(want)
        wrong[20] = wrong[20]._replace(left=9)
        wrong[11] = wrong[11]._replace(memory=(77,))
        found = first_difference(stacked(wrong), want)
        assert found == Difference(12, "memory[0]", repr(want[11].memory[0]), "77")
        doubles = stacked(want)._replace(clean=stacked(want).clean.astype("int64"))
        assert "int64" in str(first_difference(doubles, want))


def row(**changes: object) -> Row:
    values = {"check": "one NaN", "backend": "b", "device": "d", "mode": "m", "rule": "r"}
    return Row(**{**values, "steps": 5, **changes})


class TestReport:
    def test_equal_rows_share_a_line_and_others_do_not(self) -> None:
        differs = row(rule="q", difference=Difference(3, "left", "1", "2"))
        rows = [row(), row(check="resume", steps=7), row(mode="n"), differs, row(rule="s")]
        table = report.lines(rows)
        assert [(line[2:6], fine) for line, fine in table] == [
            (("m", "training", "2 rules", "17"), True),
            (("n", "one NaN", "r", "5"), True),
            (("m", "one NaN", "q", "5"), False),
        ]
        assert len(report.lines(rows, every=True)) == 5

    def test_rows_survive_json(self) -> None:
        for one in (row(), row(difference=Difference(3, "left", "1", "2")), row(error="E: x")):
            assert Row.from_dict(json.loads(json.dumps(one.to_dict()))) == one

    def test_without_rich(self, monkeypatch, capsys) -> None:
        real = builtins.__import__

        def without(name, *args, **kwargs):
            if name.startswith("rich"):
                raise ImportError(name)
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", without)
        report.show(runner.Verification(Plan(), [row()]))
        assert "one NaN  r         5  identical" in capsys.readouterr().out

    def test_the_page_escapes_and_puts_differences_first(self) -> None:
        found = runner.Verification(Plan(), [row(), row(rule="<b>", error="bad & worse")])
        text = page.page(found)
        assert "&lt;b&gt;" in text
        assert text.index("bad &amp; worse") < text.index("identical")
        assert "1 of 2 rows differ" in text

    def test_nothing_compared_is_not_fine(self) -> None:
        assert not runner.Verification(Plan()).ok
