"""The tree of policies that every backend prints."""

from __future__ import annotations

from dataclasses import dataclass

from polyamp import Policy
from polyamp._describe import Row, flow, idle, row, table

FP16, FLOAT32 = Policy.parse("fp16"), Policy.parse("float32")


@dataclass
class Decided:
    policy: Policy = FP16
    boundary: bool = True
    ran: bool = True
    rule: str | None = None
    owner: str = ""


def test_flow():
    assert flow(FP16) == "float32 -> float16 -> float32"
    assert flow(FLOAT32) == "float32"


def test_rows():
    held = [(10, "float32")]
    assert row("", "Net", held, Decided()) == Row(0, "(model)", "Net", flow(FP16), held, "default")
    ruled = Decided(rule="a.*", owner="a.b")
    assert row("a.b", "Linear", [], ruled)[:2] == (2, "b")
    assert row("a.b", "Linear", [], ruled).why == "rule 'a.*'"
    assert row("a.b.c", "Linear", [], ruled).why == "rule 'a.*' at 'a.b'"
    assert row("a", "Net", [], None, note="no policy")[3:] == ("", [], "no policy")


def test_what_has_no_policy_of_its_own():
    inner = Decided(boundary=False)
    assert row("a", "Norm", [], inner, note="kept")[3:] == ("", [], "kept")
    same = Decided(boundary=False, rule="a", owner="a")
    assert row("a", "Norm", [], same, note="kept")[3:] == (flow(FP16), [], "rule 'a'; kept")


def test_what_was_never_called():
    mark = "default; NEVER CALLED, so without effect"
    assert row("", "Net", [], Decided(ran=False), ran=True).why == mark
    assert row("", "Net", [], Decided(ran=False), ran=False).why == "default"
    found = {"": Decided(), "a": Decided(ran=False), "b": Decided(boundary=False, ran=False)}
    assert idle(found.items()) == ["a"]


def test_table():
    held = [(1000, "float32"), (24, "float16")]
    rows = [Row(0, "(model)", "Net", "float32"), Row(1, "a", "L", "", held, "default")]
    assert table(rows).splitlines() == [
        "(model): Net  float32",
        "  a: L                 1,024 float16/float32  default",
    ]
