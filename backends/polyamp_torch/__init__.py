"""The PyTorch backend: `import polyamp.torch as amp`."""

from polyamp_torch._adaptive import Adaptive as Adaptive
from polyamp_torch._calibrate import advise as advise
from polyamp_torch._calibrate import calibrate as calibrate
from polyamp_torch._capabilities import capabilities as capabilities
from polyamp_torch._cast import autocast as autocast
from polyamp_torch._cast import cast as cast
from polyamp_torch._cast import unscale as unscale
from polyamp_torch._describe import describe as describe
from polyamp_torch._describe import idle_rules as idle_rules
from polyamp_torch._describe import policy_tree as policy_tree
from polyamp_torch._distributed import reduce as reduce
from polyamp_torch._inspect import inspect as inspect
from polyamp_torch._masters import MasterWeights as MasterWeights
from polyamp_torch._modules import apply_policy as apply_policy
from polyamp_torch._modules import remove_policy as remove_policy
from polyamp_torch._ops import compiled as compiled
from polyamp_torch._ops import devices as devices
from polyamp_torch._ops import select as select
from polyamp_torch._ops import xp as xp
from polyamp_torch._replay import modes as modes
from polyamp_torch._replay import replay as replay
from polyamp_torch._scaler import GradScaler as GradScaler
from polyamp_torch._schedule import lr_step as lr_step
from polyamp_torch._toy import toy_train as toy_train
from polyamp_torch._trainer import Trainer as Trainer

NAME = "torch"
