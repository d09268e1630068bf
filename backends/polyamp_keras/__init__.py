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

from polyamp_keras._adaptive import Adaptive as Adaptive
from polyamp_keras._calibrate import advise as advise
from polyamp_keras._calibrate import calibrate as calibrate
from polyamp_keras._callbacks import CheckScaling as CheckScaling
from polyamp_keras._capabilities import capabilities as capabilities
from polyamp_keras._cast import cast as cast
from polyamp_keras._cast import unscale as unscale
from polyamp_keras._compile import compile as compile
from polyamp_keras._compile import load_model as load_model
from polyamp_keras._describe import describe as describe
from polyamp_keras._describe import policy_tree as policy_tree
from polyamp_keras._distributed import reduce as reduce
from polyamp_keras._dtype_policies import dtype_policy as dtype_policy
from polyamp_keras._dtype_policies import set_policy as set_policy
from polyamp_keras._inspect import inspect as inspect
from polyamp_keras._modules import apply_policy as apply_policy
from polyamp_keras._modules import dtype_policy_map as dtype_policy_map
from polyamp_keras._modules import remove_policy as remove_policy
from polyamp_keras._modules import to_float32 as to_float32
from polyamp_keras._ops import compiled as compiled
from polyamp_keras._ops import devices as devices
from polyamp_keras._ops import select as select
from polyamp_keras._ops import xp as xp
from polyamp_keras._replay import modes as modes
from polyamp_keras._replay import replay as replay
from polyamp_keras._scaler import LossScaleOptimizer as LossScaleOptimizer
from polyamp_keras._toy import toy_train as toy_train

NAME = "keras"
