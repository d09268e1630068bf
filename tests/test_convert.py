"""`polyamp convert`, and docs/convert.md against the code."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_foreign import MEGATRON, MEGATRON_CONFIG, TORCH, ZERO

import polyamp
from polyamp import cli
from polyamp.bench.harness import fresh_environment
from polyamp.convert import SYSTEMS

DOCS = Path(__file__).parents[1] / "docs"


def convert(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(["convert", *map(str, arguments)])
    out = capsys.readouterr()
    return status, out.out, out.err


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "torch.json"
    path.write_text(json.dumps(TORCH))
    return path


def test_to_polyamp_and_back(tmp_path: Path, saved: Path, capsys) -> None:
    status, out, err = convert(capsys, saved)
    assert (status, err) == (0, "")
    portable = json.loads(out)
    assert polyamp.scaler_from_dict(portable) == polyamp.import_scaler(TORCH)
    (tmp_path / "p.json").write_text(out)
    status, out, err = convert(capsys, tmp_path / "p.json", "--to", "torch")
    assert (status, err, json.loads(out)) == (0, "", TORCH)


def test_from_stdin(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"loss_scale": 4.0}).encode()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
    status, out, err = convert(capsys, "-", "--from", "metaseq")
    assert status == 0
    assert json.loads(out)["state"]["loss_scale"] == 4.0
    assert "polyamp convert: metaseq does not save its count of clean steps" in err


def test_a_configuration_completes_the_state(tmp_path: Path, capsys) -> None:
    source, config = tmp_path / "m.json", tmp_path / "c.json"
    source.write_text(json.dumps(MEGATRON))
    config.write_text(json.dumps(MEGATRON_CONFIG))
    status, out, err = convert(capsys, source, "--config", config)
    assert (status, err) == (0, "")
    rule = polyamp.rule_from_dict(json.loads(out)["rule"])
    assert rule == polyamp.Dynamic.like("megatron", init_scale=64.0, growth_interval=3)
    config.write_text(json.dumps(polyamp.rule_to_dict(rule)))
    assert convert(capsys, source, "--config", config)[1] == out
    status, out, err = convert(
        capsys, source, "--config", config, "--to", "megatron", "--part", "config"
    )
    assert (status, json.loads(out)) == (0, MEGATRON_CONFIG)


def test_a_loss_is_refused_unless_it_is_allowed(tmp_path: Path, capsys) -> None:
    source, target = tmp_path / "z.json", tmp_path / "t.json"
    source.write_text(json.dumps({"deep": [ZERO]}))
    status, out, err = convert(capsys, source, target, "--at", "deep.0", "--to", "torch")
    assert (status, out) == (2, "")
    assert "hysteresis=2 (would be 1)" in err
    assert not target.exists()
    status, out, err = convert(capsys, source, target, "--at", "deep.0", "--to", "torch", "--lossy")
    assert (status, out) == (0, "")
    assert "torch: lost: hysteresis=2" in err
    assert json.loads(target.read_text())["scale"] == 64.0


def test_a_file_that_is_there_is_kept(saved: Path, capsys) -> None:
    before = saved.read_bytes()
    status, _, err = convert(capsys, saved, saved)
    assert (status, saved.read_bytes()) == (2, before)
    assert "--force replaces it" in err
    assert convert(capsys, saved, saved, "--force")[0] == 0
    assert json.loads(saved.read_text())["kind"] == "scaler"


def test_ambiguity_names_the_candidates(tmp_path: Path, capsys) -> None:
    (tmp_path / "f.json").write_text('{"loss_scale": 4.0}')
    status, _, err = convert(capsys, tmp_path / "f.json")
    assert status == 2
    assert "fairseq at the top; metaseq at the top; jmp, whose scale then never changes" in err
    assert "Name the system (--from)" in err


def test_the_page_lists_every_system() -> None:
    text = (DOCS / "convert.md").read_text(encoding="utf-8")
    table = text.split("## Systems", 1)[1].split("## Writing", 1)[0]
    rows = re.findall(r"^\| `([a-z0-9-]+)`", table, flags=re.MULTILINE)
    assert sorted(rows) == sorted(SYSTEMS)


def test_the_page_s_examples_run() -> None:
    pytest.importorskip("torch", reason="docs/convert.md shows PyTorch")
    text = (DOCS / "convert.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/convert.md", "exec"), names)
    assert len(blocks) == 2


def test_the_page_is_linked() -> None:
    for page in ("index.md", "migrating.md"):
        assert "(convert.md)" in (DOCS / page).read_text(encoding="utf-8")


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path, saved: Path, capsys) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "null").symlink_to("/dev/null")
    for target in (fifo, tmp_path, Path("/dev/null"), tmp_path / "null"):
        status, _, err = convert(capsys, saved, target, "--force")
        assert (status, fifo.is_fifo()) == (2, True)
        assert "is no regular file" in err
    assert Path("/dev/null").is_char_device()


def test_links_in_a_circle_are_refused(tmp_path: Path, saved: Path, capsys) -> None:
    (tmp_path / "a.json").symlink_to(tmp_path / "b.json")
    (tmp_path / "b.json").symlink_to(tmp_path / "a.json")
    status, _, err = convert(capsys, saved, tmp_path / "a.json", "--force")
    assert status == 2
    assert len(err.splitlines()) == 1


def test_a_file_that_is_replaced_keeps_its_mode(saved: Path, capsys) -> None:
    saved.chmod(0o600)
    assert convert(capsys, saved, saved, "--force")[0] == 0
    assert saved.stat().st_mode & 0o777 == 0o600


def test_a_link_is_followed(tmp_path: Path, saved: Path, capsys) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("{}")
    link.symlink_to(real)
    status, _, err = convert(capsys, saved, link, "--force")
    assert (status, err, link.is_symlink()) == (0, "", True)
    assert json.loads(real.read_text())["kind"] == "scaler"


@pytest.mark.parametrize(
    "command", [["formats"], ["convert", "SAVED"], ["simulate", "--generate=drift:steps=9"]]
)
def test_a_full_disk_is_told_in_a_line(command: list[str], saved: Path) -> None:
    arguments = [str(saved) if word == "SAVED" else word for word in command]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "polyamp.cli", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=fresh_environment(),
        )
    assert done.returncode == 1
    assert (
        done.stderr.splitlines()[0]
        == f"polyamp {command[0]}: cannot write: No space left on device"
    )
    assert "Traceback" not in done.stderr


def test_a_closed_stdout_is_no_error() -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", '"$0" -P -m polyamp.cli formats >&-', sys.executable],
        stderr=subprocess.PIPE,
        text=True,
        env=fresh_environment(),
    )
    assert (done.returncode, done.stderr) == (0, "")
