"""Policies on functions and on models of flax (linen, nnx) and equinox.

    function:   arguments -> compute dtype, the function, results -> output dtype
    model:      the same at every module where the policy changes; parameters are kept in the
                parameter dtype and cast inside, so that gradients come back in it

Each module system has a file of its own (`_linen`, `_nnx`, `_equinox`) with `apply`, `remove` and
`found`, and is imported only for its own models.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from polyamp._errors import PolicyError
from polyamp._formats import shown
from polyamp._policy import Policy
from polyamp._policy_map import PolicyMap
from polyamp_jax._plan import FAMILIES, Applied, decide, is_a, rules_of

Model = TypeVar("Model")

_SYSTEMS = {
    "flax.linen": "polyamp_jax._linen",
    "flax.nnx": "polyamp_jax._nnx",
    "equinox": "polyamp_jax._equinox",
}


class PolicyFunction:
    """A function under a policy: callable, and picklable where the function is.

    Attributes:
        fn: the function itself.
        applied: what is cast.
    """

    def __init__(self, fn: Callable[..., Any], applied: Applied) -> None:
        self.fn, self.applied = fn, applied
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.applied.run(self.fn, args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"<{self.fn!r} under {str(self.applied.policy)!r}>"


def system_of(model: Any) -> ModuleType | None:
    """The file of this package for the module system `model` belongs to; None if to none."""
    for home, ours in _SYSTEMS.items():
        if is_a(model, home, "Module"):
            return importlib.import_module(ours)
    return None


def apply_policy(model: Model, policy: Policy | PolicyMap | str) -> Model:
    """`model` computing as a policy says; `model` itself stays as it is.

    Inputs are cast where the policy changes from one module to the next; so are outputs, to the
    policy's output dtype. Parameters are kept in the parameter dtype and cast where they are used.
    Norms (and the softmax of attention modules) compute in float32 with float32 parameters.
    Statistics, caches and other variables keep their dtypes.

    Args:
        model: one of
            - a function over pytrees: all floating arrays of its arguments are cast, parameters
              among them. It has no modules, so of a map only the default and rules for the whole
              apply.
            - a flax.linen module: the result's `init` and `apply` follow the policy. Rules are
              checked when they run, since modules are known only then.
            - a flax.nnx module: a clone, with variables of its own. `__call__` of each module
              follows the policy. Make optimizers from the result.
            - an equinox module: a new module, of the same tree but for its static part. `__call__`
              of each module follows the policy.
        policy: one for the whole model, or a map of rules by module path.

    Returns:
        What behaves as `model` under the policy. A policy that was applied before is replaced.

    Raises:
        PolicyError: not a policy, one that cannot be applied, a pattern that matches no module, or
            a module or parameter shared by places with different policies.
    """
    if isinstance(model, type):
        raise PolicyError(f"apply_policy needs a module, got the class {model.__name__}: call it")
    system = system_of(model)
    rules = rules_of(policy, ops=FAMILIES if system else ())
    if system is not None:
        return system.apply(system.remove(model), rules)
    if not callable(model):
        raise PolicyError(
            "apply_policy needs a function, or a module of flax.linen, flax.nnx or equinox, got"
            f" {shown(model)} of type {type(model).__name__}"
        )
    rules.check([""])
    return PolicyFunction(remove_policy(model), decide(rules, "", None))  # type: ignore[return-value]


def remove_policy(model: Model) -> Model:
    """`model` without a policy, parameters in their dtypes from before. What rounding took is lost.

    Returns:
        The function itself, or a new module with the weights of `model`. `model` if it has none.
    """
    if isinstance(model, PolicyFunction):
        return model.fn  # type: ignore[return-value]
    system = system_of(model)
    return model if system is None else system.remove(model)
