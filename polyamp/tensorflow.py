"""`import polyamp.tensorflow as amp`: the TensorFlow face of polyamp (needs tensorflow)."""

from polyamp_tensorflow import LossScaler as LossScaler
from polyamp_tensorflow import cast as cast

__all__ = ["LossScaler", "cast"]
