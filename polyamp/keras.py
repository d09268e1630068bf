"""`import polyamp.keras as amp`: the Keras face of polyamp (needs keras and a backend for it)."""

from polyamp_keras import CheckScaling as CheckScaling
from polyamp_keras import LossScaleOptimizer as LossScaleOptimizer
from polyamp_keras import compile as compile
from polyamp_keras import load_model as load_model
from polyamp_keras import unscale as unscale

__all__ = [
    "CheckScaling",
    "LossScaleOptimizer",
    "compile",
    "load_model",
    "unscale",
]
