"""What policies a model has, why, and which rules never did anything."""

from __future__ import annotations

import torch

from polyamp_torch._modules import APPLIED, Applied, rules_of, unwrapped

Module = torch.nn.Module


def describe(model: Module) -> None:
    """Print the model as a tree: module, class, policy, parameters, why (`policy_tree`)."""
    print(policy_tree(model))


def policy_tree(model: Module) -> str:
    """The model as a tree of text, one line a module.

    Each line has the module's name and class, its compute dtype (parameters' -> compute's ->
    outputs' where they differ), the number and dtypes of the parameters it owns, and the rule that
    decides. Modules that have the policy of what encloses them, and no rule of their own, show no
    policy. After a forward pass a wrapped module that was not called is marked. `op:` rules follow
    at the end.
    """
    root = unwrapped(model)
    ran = any(a.ran for a in _applied(root).values())
    rows = [_row(path, module, ran) for path, module in root.named_modules()]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]).rstrip()
        for row in rows
    ]
    rules = rules_of(model)
    ops = () if rules is None else rules.op_rules
    return "\n".join([*lines, *(f"op:{family}  {policy.compute_dtype}" for family, policy in ops)])


def idle_rules(model: Module) -> list[str]:
    """Paths of modules that have a policy of their own and whose forward was never called.

    Their weights may be used all the same, by a parent that calls functional operations on them
    (MultiheadAttention's out_proj, heads tied to an embedding): then the rule had no effect. Ask
    after a forward pass.
    """
    return [path for path, a in _applied(unwrapped(model)).items() if a.boundary and not a.ran]


def _applied(root: Module) -> dict[str, Applied]:
    found = {path: module.__dict__.get(APPLIED) for path, module in root.named_modules()}
    return {path: applied for path, applied in found.items() if applied is not None}


def _row(path: str, module: Module, ran: bool) -> tuple[str, str, str, str]:
    indent = "  " * (path.count(".") + 1 if path else 0)
    name = indent + (path.rpartition(".")[2] or "(model)") + ": " + type(module).__name__
    own = list(module.parameters(recurse=False))
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in own})
    count = f"{sum(p.numel() for p in own):,} {'/'.join(kinds)}" if own else ""
    applied = module.__dict__.get(APPLIED)
    if applied is None:
        return name, "", count, "no policy"
    if not applied.boundary and (applied.rule is None or applied.owner != path):
        return name, "", count, ""
    policy = applied.policy
    dtypes = (policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    flow = dtypes if len(set(dtypes)) > 1 else dtypes[:1]
    why = "default" if applied.rule is None else f"rule {applied.rule!r}"
    if applied.rule is not None and applied.owner != path:
        why += f" at {applied.owner!r}"
    if applied.boundary and ran and not applied.ran:
        why += "; NEVER CALLED, so without effect"
    return name, " -> ".join(flow), count, why
