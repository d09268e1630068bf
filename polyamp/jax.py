"""`import polyamp.jax as amp`: the JAX face of polyamp (needs jax, flax and optax)."""

from polyamp_jax import Adaptive as Adaptive
from polyamp_jax import DynamicScale as DynamicScale
from polyamp_jax import LossScaledState as LossScaledState
from polyamp_jax import Plan as Plan
from polyamp_jax import advise as advise
from polyamp_jax import apply_policy as apply_policy
from polyamp_jax import autocast as autocast
from polyamp_jax import calibrate as calibrate
from polyamp_jax import capabilities as capabilities
from polyamp_jax import check as check
from polyamp_jax import decision as decision
from polyamp_jax import describe as describe
from polyamp_jax import from_dict as from_dict
from polyamp_jax import idle_rules as idle_rules
from polyamp_jax import loss_scaled as loss_scaled
from polyamp_jax import pmean as pmean
from polyamp_jax import policy_tree as policy_tree
from polyamp_jax import remove_policy as remove_policy
from polyamp_jax import restored as restored
from polyamp_jax import scaler_state as scaler_state
from polyamp_jax import step as step
from polyamp_jax import to_dict as to_dict
from polyamp_jax import units as units
from polyamp_jax import value_and_grad as value_and_grad
from polyamp_jax import value_grad_and_statistics as value_grad_and_statistics

__all__ = [
    "Adaptive",
    "DynamicScale",
    "LossScaledState",
    "Plan",
    "advise",
    "apply_policy",
    "autocast",
    "calibrate",
    "capabilities",
    "check",
    "decision",
    "describe",
    "from_dict",
    "idle_rules",
    "loss_scaled",
    "pmean",
    "policy_tree",
    "remove_policy",
    "restored",
    "scaler_state",
    "step",
    "to_dict",
    "units",
    "value_and_grad",
    "value_grad_and_statistics",
]
