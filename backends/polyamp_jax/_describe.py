"""What policies a model has, why, and which rules never did anything."""

from __future__ import annotations

from typing import Any

from polyamp._describe import Row, idle, row, table
from polyamp._errors import PolicyError
from polyamp._formats import shown
from polyamp_jax._modules import PolicyFunction, system_of
from polyamp_jax._plan import Found


def describe(model: Any) -> None:
    """Print the model as a tree: module, class, policy, parameters, why (`policy_tree`)."""
    print(policy_tree(model))


def policy_tree(model: Any) -> str:
    """The model as a tree of text, one line a module.

    Each line has the module's name and class, its compute dtype (parameters' -> compute's ->
    outputs' where they differ), the number and dtypes of the parameters it owns, and the rule that
    decides. Modules that have the policy of what encloses them, and no rule of their own, show no
    policy; norms that are kept in float32 say so. A boundary that was not called while others were
    is marked. Modules of flax.linen are known after `init` or `apply`; before, only the model
    itself is shown.

    Raises:
        PolicyError: neither a function under a policy nor a model.
    """
    found = _found(model)
    known = [of.applied for of in found if of.applied is not None]
    ran = any(applied.ran for applied in known)
    return table([_row(of, ran, "" if known else "no policy") for of in found])


def idle_rules(model: Any) -> list[str]:
    """Paths of modules that have a policy of their own and were never called.

    Their parameters may be used all the same, by a parent that does not call them: then the rule
    did not cast inputs and outputs there. Ask after a call or a trace. What a compiled function
    took from its cache ran no Python and leaves no mark.
    """
    return idle((of.path, of.applied) for of in _found(model) if of.applied is not None)


def _row(of: Found, ran: bool, unknown: str) -> Row:
    norm = of.applied is not None and of.applied.norm
    note = unknown or ("kept in float32" if norm else "")
    return row(of.path, of.kind, of.held, of.applied, ran=ran, note=note)


def _found(model: Any) -> list[Found]:
    if isinstance(model, PolicyFunction):
        return [Found("", getattr(model, "__name__", "function"), [], model.applied)]
    system = system_of(model)
    if system is None:
        raise PolicyError(
            "expected a function that apply_policy returned or a module of flax or equinox, got"
            f" {shown(model)}"
        )
    found: list[Found] = system.found(model)
    return found
