"""What policies a model has, why, and which rules never did anything."""

from __future__ import annotations

import torch

from polyamp._describe import Row, idle, row, table
from polyamp_torch._modules import APPLIED, Applied, rules_of
from polyamp_torch._wrappers import unwrapped

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
    found = _applied(root)
    ran = any(applied.ran for applied in found.values())
    rows = [_row(path, module, found.get(path), ran) for path, module in root.named_modules()]
    rules = rules_of(model)
    ops = () if rules is None else rules.op_rules
    lines = [f"op:{family}  {policy.compute_dtype}" for family, policy in ops]
    return "\n".join([table(rows), *lines])


def idle_rules(model: Module) -> list[str]:
    """Paths of modules that have a policy of their own and whose forward was never called.

    Their weights may be used all the same, by a parent that calls functional operations on them
    (MultiheadAttention's out_proj, heads tied to an embedding): then the rule had no effect. Ask
    after a forward pass.
    """
    return idle(_applied(unwrapped(model)).items())


def _applied(root: Module) -> dict[str, Applied]:
    found = {path: module.__dict__.get(APPLIED) for path, module in root.named_modules()}
    return {path: applied for path, applied in found.items() if applied is not None}


def _row(path: str, module: Module, applied: Applied | None, ran: bool) -> Row:
    own = module.parameters(recurse=False)
    held = [(p.numel(), str(p.dtype).removeprefix("torch.")) for p in own]
    note = "no policy" if applied is None else ""
    return row(path, type(module).__name__, held, applied, ran=ran, note=note)
