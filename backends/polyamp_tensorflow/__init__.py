"""The TensorFlow backend: `import polyamp.tensorflow as amp`."""

from polyamp_tensorflow._cast import cast as cast
from polyamp_tensorflow._cast import unscale as unscale
from polyamp_tensorflow._distributed import reduce as reduce
from polyamp_tensorflow._inspect import inspect as inspect
from polyamp_tensorflow._ops import compiled as compiled
from polyamp_tensorflow._ops import devices as devices
from polyamp_tensorflow._ops import select as select
from polyamp_tensorflow._ops import xp as xp
from polyamp_tensorflow._replay import modes as modes
from polyamp_tensorflow._replay import replay as replay
from polyamp_tensorflow._scaler import LossScaler as LossScaler
from polyamp_tensorflow._toy import toy_train as toy_train

NAME = "tensorflow"
