"""The Keras backend, on Keras' own three backends: `import polyamp.keras as amp`."""

try:
    import keras as _keras  # noqa: F401
except ModuleNotFoundError as error:
    framework = str(error.name).partition(".")[0]
    if framework not in ("tensorflow", "jax", "torch"):
        raise
    raise ModuleNotFoundError(
        f"Keras is set to run on {framework}, which is not installed; set the environment"
        " variable KERAS_BACKEND to tensorflow, jax or torch",
        name=framework,
    ) from error

from polyamp_keras._callbacks import CheckScaling as CheckScaling
from polyamp_keras._cast import cast as cast
from polyamp_keras._cast import unscale as unscale
from polyamp_keras._compile import compile as compile
from polyamp_keras._compile import load_model as load_model
from polyamp_keras._distributed import reduce as reduce
from polyamp_keras._inspect import inspect as inspect
from polyamp_keras._ops import compiled as compiled
from polyamp_keras._ops import devices as devices
from polyamp_keras._ops import select as select
from polyamp_keras._ops import xp as xp
from polyamp_keras._scaler import LossScaleOptimizer as LossScaleOptimizer
from polyamp_keras._toy import toy_step as toy_step

NAME = "keras"
