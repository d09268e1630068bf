"""A model's modules as a tree of text: what the `policy_tree` of each backend prints.

    name: class        flow of dtypes    parameters    why

Backends collect the rows; how they are worded and set stands here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from polyamp._policy import Policy

Held = Sequence[tuple[int, str]]
"""Size and dtype of each parameter that a module holds itself."""


class Decided(Protocol):
    """What a backend keeps of its decision for one module."""

    @property
    def policy(self) -> Policy:
        """The policy in force."""

    @property
    def boundary(self) -> bool:
        """Whether it differs from that of the enclosing module."""

    @property
    def ran(self) -> bool:
        """Whether the module was called since."""

    @property
    def rule(self) -> str | None:
        """The pattern that gave the policy; None: the default."""

    @property
    def owner(self) -> str:
        """Path of the module that the pattern matched."""


class Row(NamedTuple):
    """One module."""

    depth: int
    """How many modules and containers enclose it."""
    name: str
    kind: str
    """Name of its class."""
    flow: str = ""
    """Its dtypes, see `flow`; empty where they are those of what encloses it."""
    held: Held = ()
    why: str = ""


def row(
    path: str,
    kind: str,
    held: Held,
    decided: Decided | None,
    *,
    ran: bool = False,
    note: str = "",
) -> Row:
    """The row of the module at `path`, "" being the model itself.

    Args:
        path: names joined by dots.
        kind: name of its class.
        held: see `Held`.
        decided: the decision for it, None where there is none.
        ran: whether the model was called: then a boundary that was not is marked.
        note: what else there is to say of it.
    """
    depth = path.count(".") + 1 if path else 0
    name = path.rpartition(".")[2] or "(model)"
    own = decided is not None and decided.rule is not None and decided.owner == path
    if decided is None or not (decided.boundary or own):
        return Row(depth, name, kind, "", held, note)
    words = ["default" if decided.rule is None else f"rule {decided.rule!r}"]
    if decided.rule is not None and not own:
        words[0] += f" at {decided.owner!r}"
    if note:
        words.append(note)
    if decided.boundary and ran and not decided.ran:
        words.append("NEVER CALLED, so without effect")
    return Row(depth, name, kind, flow(decided.policy), held, "; ".join(words))


def flow(policy: Policy) -> str:
    """Dtypes of parameters, computation and outputs, "a -> b -> c"; one where they are the same."""
    dtypes = (policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    return " -> ".join(dtypes if len(set(dtypes)) > 1 else dtypes[:1])


def idle(decisions: Iterable[tuple[str, Decided]]) -> list[str]:
    """Paths of the modules that have a policy of their own and were never called."""
    return [path for path, decided in decisions if decided.boundary and not decided.ran]


def table(rows: Sequence[Row]) -> str:
    """The rows, one a line, in columns."""
    lines = [(f"{'  ' * r.depth}{r.name}: {r.kind}", r.flow, _count(r.held), r.why) for r in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    return "\n".join(
        "  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[3]]).rstrip()
        for line in lines
    )


def _count(held: Held) -> str:
    dtypes = "/".join(sorted({dtype for _, dtype in held}))
    return f"{sum(size for size, _ in held):,} {dtypes}" if held else ""
