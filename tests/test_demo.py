"""The demo without a framework: its data, its comparison, its table and its JSON."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from io import StringIO
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from polyamp import BackendError, PolicyError, PolyampError, cli
from polyamp.demo import Device, Result, Settings, data, runner, settings, table
from polyamp.demo.progress import Bar, Lines, progress_on

TINY = Settings(steps=3, batch=4, learning_rate=0.1, width=8, depth=1, heads=2, context=32)
MS = {"float32": 10.0, "float16": 25.0, "bfloat16": 5.0}


class FakeBackend:
    """Answers at once, with numbers that depend on the policy's compute dtype."""

    def __init__(self, *, accelerator: bool = False, metric: dict[str, float] | None = None):
        self.accelerator = accelerator
        self.metric = metric or {"float32": 0.5, "float16": 0.25, "bfloat16": 0.75}
        self.trained: list[str] = []

    def versions(self):
        return {"fake": "1.2"}

    def device(self, requested):
        return Device(requested or "cpu", "an abacus", self.accelerator)

    def check(self, policy, device):
        if policy.compute_dtype == "float64":
            raise PolicyError("fake cannot compute in float64")

    def train(self, task, policy, settings, device, on_step):
        dtype = policy.compute_dtype
        self.trained.append(f"{task.name} {dtype}")
        for step in range(1, settings.steps + 1):
            on_step(step, 1.0 / step)
        scaled = dtype == "float16"
        kind = "peak memory" if self.accelerator else "saved for backward"
        losses = tuple(1.0 / step for step in range(1, settings.steps + 1))
        scale = 512.0 if scaled else None
        return Result(MS[dtype], 2048, kind, self.metric[dtype], 2 * scaled, scale, losses)


@pytest.fixture
def fake(monkeypatch):
    """FakeBackend as the one installed framework."""
    backend, module, demo = FakeBackend(), ModuleType("fakework"), ModuleType("fakework._demo")
    for name in ("versions", "device", "check", "train"):
        setattr(demo, name, getattr(backend, name))
    monkeypatch.setitem(sys.modules, "fakework", module)
    monkeypatch.setitem(sys.modules, "fakework._demo", demo)
    monkeypatch.setattr("polyamp.backends", lambda: {"fake": module})
    return backend


def cpuinfo():
    file = Path("/proc/cpuinfo")
    return file.read_text() if file.exists() else ""


def rows_of(backend, policies=settings.POLICIES, tasks=("digits",)):
    runs = runner.plan({"fake": backend}, policies, tasks)
    return list(runner.execute(runs, Lines(Console(file=StringIO()), len(runs))))


def test_float32_runs_first_and_equal_policies_once():
    policies = ["mixed_float16", "no", "float32", "bf16-mixed"]
    runs = runner.plan({"fake": FakeBackend()}, policies, ["text", "digits", "text"])
    assert [(r.task.name, r.policy_name) for r in runs] == [
        (task, policy)
        for task in ("text", "digits")
        for policy in ("no", "mixed_float16", "bf16-mixed")
    ]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tasks": ["digit"]}, PolyampError, "no task 'digit'.*digits, text.*did you mean"),
        ({"policies": ["mixed_float61"]}, PolicyError, "mixed_float16"),
        ({"policies": ["float32", "float64"]}, PolicyError, "cannot compute in float64"),
        ({"seed": -1}, PolyampError, "0 to 4294967295, got -1"),
    ],
)
def test_bad_options_are_refused_before_anything_trains(change, error, message):
    backend = FakeBackend()
    options = {"policies": ["float32"], "tasks": ["digits"], **change}
    with pytest.raises(error, match=message):
        list(runner.execute(runner.plan({"fake": backend}, **options), Lines(Console(), 1)))
    assert backend.trained == []


def test_rows_compare_with_float32():
    rows = rows_of(FakeBackend(), ("mixed_float16", "float32", "mixed_bfloat16"))
    assert [row.run.policy_name for row in rows] == list(settings.POLICIES)
    assert [row.speedup for row in rows] == [1.0, 0.4, 2.0]
    assert [row.metric_diff for row in rows] == [0.0, -0.25, 0.25]


def test_without_float32_there_is_nothing_to_compare_with():
    (row,) = rows_of(FakeBackend(), ["fp16"])
    assert (row.speedup, row.metric_diff) == (None, None)
    assert table.cells(row)[5] == table.cells(row)[8] == "-"


def test_tasks_are_compared_apart():
    rows = rows_of(FakeBackend(), tasks=("digits", "text"))
    assert [row.speedup for row in rows] == [1.0, 0.4, 2.0] * 2


@pytest.mark.parametrize("task", settings.TASKS)
@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("accelerator", [True, False])
def test_sizes_fit_together(task, quick, accelerator):
    size = settings.settings_for(task, quick=quick, accelerator=accelerator, seed=5)
    assert size.seed == 5
    assert size.batch % size.accumulate == 0
    assert size.width % size.heads == 0
    full = settings.settings_for(task, quick=False, accelerator=accelerator)
    assert size.steps <= full.steps


# Backends.


def test_a_backend_without_a_demo_is_passed_over_unless_asked_for(fake, monkeypatch):
    bare = ModuleType("barework")
    monkeypatch.setitem(sys.modules, "barework", bare)
    monkeypatch.setattr("polyamp.backend", lambda name: bare)
    both = {"bare": bare, "fake": sys.modules["fakework"]}
    monkeypatch.setattr("polyamp.backends", lambda: both)
    assert list(runner.demo_backends()) == ["fake"]
    with pytest.raises(BackendError, match=r"'bare' has no demo.*barework\._demo"):
        runner.demo_backends(["bare"])


def test_a_backend_may_come_in_variants(fake, monkeypatch):
    kinds = {"slow": FakeBackend(), "fast": fake}
    monkeypatch.setattr(sys.modules["fakework._demo"], "variants", lambda: kinds, raising=False)
    assert runner.demo_backends() == {"fake (slow)": kinds["slow"], "fake (fast)": fake}
    assert cli.main(["demo", "--task", "digits", "--policy", "no"]) == 0
    assert [len(kind.trained) for kind in kinds.values()] == [1, 1]


def test_no_framework_at_all(monkeypatch):
    monkeypatch.setattr("polyamp.backends", dict)
    with pytest.raises(BackendError, match=r"polyamp\[torch\]"):
        runner.demo_backends()


def test_unknown_framework():
    with pytest.raises(BackendError, match="no backend 'tochr'"):
        runner.demo_backends(["tochr"])


# Output.


def test_cells_carry_units():
    rows = rows_of(FakeBackend(), tasks=("digits", "text"))
    assert table.cells(rows[1]) == [
        "fake", "cpu", "digits", "mixed_float16",
        "25.00", "0.40x", "2 KiB", "25.00 %", "-25.00", "2", "512",
    ]  # fmt: skip
    assert table.cells(rows[5])[5:] == ["2.00x", "2 KiB", "0.750 bpc", "+0.250", "0", "off"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (1536, "1.5 KiB"),
        (5 * 2**30, "5 GiB"),
        (2**49, "512 TiB"),
    ],
)
def test_sizes(count, text):
    assert table.size_text(count) == text


@pytest.mark.parametrize("width", [80, 108, 160])
def test_the_table_fits(width):
    rows = rows_of(FakeBackend(), tasks=("digits", "text"))
    console = Console(file=StringIO(), width=width)
    console.print(table.table_of(rows, width))
    text = console.file.getvalue()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert text.count("mixed_bfloat16") == 2
    assert ("framework" in text) == (width >= table.NARROW)
    assert "saved for" in text
    assert text.count("25.00 %") == 1


def test_memory_kinds_are_told_apart():
    rows = rows_of(FakeBackend(), ["float32"]) + rows_of(FakeBackend(accelerator=True), ["float32"])
    console = Console(file=StringIO(), width=160)
    console.print(table.table_of(rows, 160))
    assert "2 KiB saved for backward" in console.file.getvalue()
    assert "2 KiB peak memory" in console.file.getvalue()


def test_lines_under_the_table_give_baselines_and_what_was_measured(monkeypatch):
    monkeypatch.setattr(table, "UNIT_FLAGS", {"float16": {"none such"}, "bfloat16": {"either"}})
    lines = table.lines_under(rows_of(FakeBackend(), tasks=("digits", "text")))
    assert "364 held-out images, standard error 2.6 points" in lines[0]
    baseline = data.load("text", settings.settings_for("text", quick=False, accelerator=False)
                         .context).baseline  # fmt: skip
    assert f"a unigram model of the training text gives {baseline:.3f} bpc" in lines[1]
    assert "until its backward pass, parameters left out" in lines[2]
    assert "fake mixed_float16 2.5x (digits), 2.5x (text)." in lines[3]
    assert "bfloat16" not in lines[3]
    if "flags" in cpuinfo():
        assert "It has no float16 arithmetic." in lines[3]


def test_nothing_is_called_slow_on_an_accelerator():
    assert table.slower_on_cpu(rows_of(FakeBackend(accelerator=True))) == []


def test_a_diverged_run_is_said_to_be_one():
    metric = {"float32": 0.5, "float16": math.nan, "bfloat16": 0.5}
    row = rows_of(FakeBackend(metric=metric))[1]
    assert table.cells(row)[7:9] == ["diverged", "-"]
    assert row.to_dict()["metric"] is None
    assert "NaN" not in json.dumps(row.to_dict(), allow_nan=False)


def test_bar_on_a_terminal_lines_elsewhere():
    assert isinstance(progress_on(Console(force_terminal=True), 2), Bar)
    screen = Console(file=StringIO(), force_terminal=True, width=100)
    with Bar(screen, 2) as bar:
        bar.begin("fake digits float32", 10)
        bar.step(10, 0.125)
        bar.step(10, None)
        bar._live.refresh()
        bar.end("all is [well]")
    shown = screen.file.getvalue()
    for part in ("1/2", "fake digits float32", "10/10", "loss 0.125", "float32: all is [well]"):
        assert part in shown


class Drawing(FakeBackend):
    """A backend with a bar of its own."""

    draws = True

    def train(self, task, policy, settings, device, on_step, terminal=None):
        if terminal is not None:
            terminal.write("120/120 own bar\n")
        return super().train(task, policy, settings, device, on_step)


def test_a_framework_may_draw_its_own_bar():
    screen = Console(file=StringIO(), force_terminal=True, width=100)
    planned = runner.plan({"fake": Drawing()}, ["float32"], ["digits"], quick=True)
    with progress_on(screen, 1) as bar:
        assert len(list(runner.execute(planned, bar))) == 1
        assert bar._live.live.is_started
    shown = screen.file.getvalue()
    first, own, last = (
        shown.index(s) for s in ("1/1 fake digits float32", "120/120 own bar", "float32: loss")
    )
    assert first < own < last
    quiet = Console(file=StringIO())
    with progress_on(quiet, 1) as lines:
        assert len(list(runner.execute(planned, lines))) == 1
    assert "own bar" not in quiet.file.getvalue()


def test_main_prints_plain_lines_and_the_table(fake, capsys):
    assert cli.main(["demo", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "1/6 fake digits float32, 120 steps" in out
    assert "loss 1.000 -> 0.008, held-out 50.00 %" in out
    assert "fake on cpu (an abacus)" in out
    assert "\x1b" not in out


def test_json_is_one_object_and_alone_on_stdout(fake, capsys):
    arguments = ["demo", "--json", "--seed", "3", "--task", "text", "--device", "box"]
    assert cli.main([*arguments, "--policy", "fp16", "--policy", "no"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["demo"] == "full"
    assert report["device"] == "an abacus"
    assert report["seed"] == 3
    assert {"polyamp", "python", "numpy", "fake"} <= report["versions"].keys()
    assert [(r["policy"], r["speedup"]) for r in report["rows"]] == [("no", 1.0), ("fp16", 0.4)]
    row = report["rows"][1]
    assert row.keys() == {
        "framework", "device", "task", "policy", "step_ms", "speedup", "memory_bytes",
        "memory_kind", "metric", "metric_name", "metric_diff", "baseline", "baseline_name",
        "skipped", "scale", "steps", "first_loss", "last_loss", "seconds",
    }  # fmt: skip
    assert (row["device"], row["scale"], row["skipped"]) == ("box", 512.0, 2)
    assert row["metric_diff"] == -0.25
    assert "2/2 fake text fp16" in captured.err


def test_a_bad_option_ends_with_status_2_and_a_message(fake, capsys):
    assert cli.main(["demo", "--task", "txet"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no task 'txet'" in captured.err
    assert fake.trained == []


def test_without_rich_the_extra_is_named(fake, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert cli.main(["demo"]) == 2
    assert 'pip install "polyamp[demo]"' in capsys.readouterr().err


def test_importing_the_demo_imports_nothing_heavy():
    code = (
        "import sys, polyamp.demo, polyamp.demo.settings; "
        "print(sorted({'numpy', 'torch', 'rich', 'sklearn'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr
