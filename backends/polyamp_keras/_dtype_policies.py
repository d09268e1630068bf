"""Keras' dtype policies made from polyamp's.

Keras knows a policy by its name only: a dtype (variables and computation), or `mixed_float16` and
`mixed_bfloat16` (float32 variables). A layer returns its compute dtype. Source:
`keras/src/dtype_policies/dtype_policy.py`.
"""

from __future__ import annotations

from typing import Any

import keras

from polyamp._errors import PolicyError
from polyamp._policy import Policy, parse_policy, require_supported
from polyamp._policy_map import PolicyMap

LOW = ("float16", "bfloat16")
_WIDE = ("float32", "float64")
_NAMES = {
    **{(dtype, dtype): dtype for dtype in (*LOW, *_WIDE)},
    **{("float32", dtype): f"mixed_{dtype}" for dtype in LOW},
}
"""Keras' name by (param_dtype, compute_dtype)."""


def name_of(policy: Policy) -> str:
    """Keras' name for a policy's variables and computation.

    Raises:
        PolicyError: Keras has no such policy.
    """
    formats = (*LOW, *_WIDE)
    require_supported(policy, "keras", param=formats, compute=formats, output=formats)
    name = _NAMES.get((policy.param_dtype, policy.compute_dtype))
    if name is None:
        raise PolicyError(
            f"backend 'keras' has no dtype policy with {policy.param_dtype} variables and"
            f" {policy.compute_dtype} compute (of {str(policy)!r}); allowed:"
            f" {', '.join(_NAMES.values())}"
        )
    if policy.output_dtype != policy.compute_dtype and not wants_float32_outputs(policy):
        raise PolicyError(
            f"backend 'keras' cannot return {policy.output_dtype} from layers that compute in"
            f" {policy.compute_dtype} (of {str(policy)!r}); allowed: output={policy.compute_dtype}"
            + (", output=float32" if policy.compute_dtype in LOW else "")
        )
    return name


def wants_float32_outputs(policy: Policy) -> bool:
    """Whether a policy computes in a low-precision format and returns float32."""
    return policy.compute_dtype in LOW and policy.output_dtype == "float32"


def read_policy(policy: Policy | keras.DTypePolicy | str) -> Policy:
    """A policy from what users pass: also Keras' own objects, by their names.

    Raises:
        PolicyError: not a policy, a map, or a quantized one.
    """
    given: Any = policy
    one = isinstance(given, keras.DTypePolicy)
    if one and not isinstance(given, keras.dtype_policies.DTypePolicyMap):
        return parse_policy(given.name)
    return parse_policy(given)


def dtype_policy(policy: Policy | keras.DTypePolicy | str) -> keras.DTypePolicy:
    """The Keras policy with the variables and the compute dtype of `policy`.

    A Keras layer returns its compute dtype, so `output=float32` of a low-precision policy is lost
    here; `apply_policy` gives a model's last layers a float32 policy for it.

    Args:
        policy: a Policy, any string `Policy.parse` reads, or a Keras policy.

    Raises:
        PolicyError: not a policy, or one that Keras cannot express: `master=`, `store=`,
            `accumulate=`, tfloat32, float8, variables other than float32 or the compute dtype.
    """
    return keras.DTypePolicy(name_of(read_policy(policy)))


def set_policy(policy: Policy | str | keras.DTypePolicy) -> keras.DTypePolicy:
    """Make `policy` Keras' global one, which layers made from now on get.

    Args:
        policy: as `dtype_policy` takes it, or a Keras policy or policy map (`dtype_policy_map`).

    Returns:
        The global policy until now; give it to `set_policy` to have it back.

    Raises:
        PolicyError: as `dtype_policy`, or a `PolicyMap`, which needs a model.
    """
    if isinstance(policy, PolicyMap):
        raise PolicyError(
            "set_policy takes one policy, since a PolicyMap needs the layers of a model; use"
            " apply_policy(model, rules), or set_policy(dtype_policy_map(rules, model))"
        )
    new: Any = policy if isinstance(policy, keras.DTypePolicy) else dtype_policy(policy)
    old: keras.DTypePolicy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(new)
    return old
