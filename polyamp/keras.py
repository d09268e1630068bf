"""`import polyamp.keras as amp`: the Keras face of polyamp (needs keras and a backend for it)."""

from polyamp_keras import Adaptive as Adaptive
from polyamp_keras import CheckScaling as CheckScaling
from polyamp_keras import LossScaleOptimizer as LossScaleOptimizer
from polyamp_keras import advise as advise
from polyamp_keras import apply_policy as apply_policy
from polyamp_keras import calibrate as calibrate
from polyamp_keras import capabilities as capabilities
from polyamp_keras import compile as compile
from polyamp_keras import describe as describe
from polyamp_keras import dtype_policy as dtype_policy
from polyamp_keras import dtype_policy_map as dtype_policy_map
from polyamp_keras import load_model as load_model
from polyamp_keras import policy_tree as policy_tree
from polyamp_keras import remove_policy as remove_policy
from polyamp_keras import set_policy as set_policy
from polyamp_keras import to_float32 as to_float32
from polyamp_keras import unscale as unscale

__all__ = [
    "Adaptive",
    "CheckScaling",
    "LossScaleOptimizer",
    "advise",
    "apply_policy",
    "calibrate",
    "capabilities",
    "compile",
    "describe",
    "dtype_policy",
    "dtype_policy_map",
    "load_model",
    "policy_tree",
    "remove_policy",
    "set_policy",
    "to_float32",
    "unscale",
]
