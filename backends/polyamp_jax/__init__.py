"""The JAX backend: `import polyamp.jax as amp`."""

from polyamp_jax._adaptive import Adaptive as Adaptive
from polyamp_jax._autocast import autocast as autocast
from polyamp_jax._calibrate import advise as advise
from polyamp_jax._calibrate import calibrate as calibrate
from polyamp_jax._capabilities import capabilities as capabilities
from polyamp_jax._cast import cast as cast
from polyamp_jax._cast import unscale as unscale
from polyamp_jax._describe import describe as describe
from polyamp_jax._describe import idle_rules as idle_rules
from polyamp_jax._describe import policy_tree as policy_tree
from polyamp_jax._distributed import pmean as pmean
from polyamp_jax._distributed import reduce as reduce
from polyamp_jax._dynamic_scale import DynamicScale as DynamicScale
from polyamp_jax._gradients import Plan as Plan
from polyamp_jax._gradients import value_and_grad as value_and_grad
from polyamp_jax._gradients import value_grad_and_statistics as value_grad_and_statistics
from polyamp_jax._inspect import inspect as inspect
from polyamp_jax._modules import apply_policy as apply_policy
from polyamp_jax._modules import remove_policy as remove_policy
from polyamp_jax._ops import compiled as compiled
from polyamp_jax._ops import devices as devices
from polyamp_jax._ops import select as select
from polyamp_jax._ops import xp as xp
from polyamp_jax._replay import modes as modes
from polyamp_jax._replay import replay as replay
from polyamp_jax._scaler import LossScaledState as LossScaledState
from polyamp_jax._scaler import loss_scaled as loss_scaled
from polyamp_jax._scaler import step as step
from polyamp_jax._state import check as check
from polyamp_jax._state import decision as decision
from polyamp_jax._state import from_dict as from_dict
from polyamp_jax._state import restored as restored
from polyamp_jax._state import scaler_state as scaler_state
from polyamp_jax._state import to_dict as to_dict
from polyamp_jax._toy import toy_train as toy_train
from polyamp_jax._units import units as units

NAME = "jax"
