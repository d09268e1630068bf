"""What policies a model has, why, and which rules never did anything."""

from __future__ import annotations

from typing import Any

from polyamp._errors import PolicyError
from polyamp._formats import shown
from polyamp_jax._modules import PolicyFunction, system_of
from polyamp_jax._plan import Row


def describe(model: Any) -> None:
    """Print the model as a tree: module, class, policy, parameters, why (`policy_tree`)."""
    print(policy_tree(model))


def policy_tree(model: Any) -> str:
    """The model as a tree of text, one line a module.

    Each line has the module's name and class, its compute dtype (parameters' -> compute's ->
    outputs' where they differ), the number and dtypes of the parameters it owns, and the rule that
    decides. Modules that have the policy of what encloses them show no policy, but norms that are
    kept in float32. A boundary that was not called while others were is marked. Modules of
    flax.linen are known after `init` or `apply`; before, only the model itself is shown.

    Raises:
        PolicyError: neither a function under a policy nor a model.
    """
    rows = _rows(model)
    known = [row.applied for row in rows if row.applied is not None]
    ran = any(applied.ran for applied in known)
    lines = [_line(row, "" if known else "no policy", ran) for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    return "\n".join(
        "  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[3]]).rstrip()
        for line in lines
    )


def idle_rules(model: Any) -> list[str]:
    """Paths of modules that have a policy of their own and were never called.

    Their parameters may be used all the same, by a parent that does not call them: then the rule
    did not cast inputs and outputs there. Ask after a call or a trace. What a compiled function
    took from its cache ran no Python and leaves no mark.
    """
    return [r.path for r in _rows(model) if r.applied and r.applied.boundary and not r.applied.ran]


def _rows(model: Any) -> list[Row]:
    if isinstance(model, PolicyFunction):
        return [Row("", getattr(model, "__name__", "function"), [], model.applied)]
    system = system_of(model)
    if system is None:
        raise PolicyError(
            "expected a function that apply_policy returned or a module of flax or equinox, got"
            f" {shown(model)}"
        )
    rows: list[Row] = system.rows(model)
    return rows


def _line(row: Row, none: str, ran: bool) -> tuple[str, str, str, str]:
    indent = "  " * (row.path.count(".") + 1 if row.path else 0)
    name = indent + (row.path.rpartition(".")[2] or "(model)") + ": " + row.kind
    dtypes = "/".join(sorted({dtype for _, dtype in row.held}))
    count = f"{sum(size for size, _ in row.held):,} {dtypes}" if row.held else ""
    applied = row.applied
    if applied is None:
        return name, "", count, none
    if not applied.boundary:
        return name, "", count, "kept in float32" if applied.norm else ""
    policy = applied.policy
    flow = (policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    why = "default" if applied.rule is None else f"rule {applied.rule!r}"
    if applied.rule is not None and applied.owner != row.path:
        why += f" at {applied.owner!r}"
    if ran and not applied.ran:
        why += "; NEVER CALLED, so without effect"
    return name, " -> ".join(flow if len(set(flow)) > 1 else flow[:1]), count, why
