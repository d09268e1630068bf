"""`import polyamp.torch as amp`: the PyTorch face of polyamp (needs torch)."""

from polyamp_torch import Adaptive as Adaptive
from polyamp_torch import GradScaler as GradScaler
from polyamp_torch import MasterWeights as MasterWeights
from polyamp_torch import Trainer as Trainer
from polyamp_torch import advise as advise
from polyamp_torch import apply_policy as apply_policy
from polyamp_torch import autocast as autocast
from polyamp_torch import calibrate as calibrate
from polyamp_torch import capabilities as capabilities
from polyamp_torch import describe as describe
from polyamp_torch import idle_rules as idle_rules
from polyamp_torch import lr_step as lr_step
from polyamp_torch import policy_tree as policy_tree
from polyamp_torch import remove_policy as remove_policy

__all__ = [
    "Adaptive",
    "GradScaler",
    "MasterWeights",
    "Trainer",
    "advise",
    "apply_policy",
    "autocast",
    "calibrate",
    "capabilities",
    "describe",
    "idle_rules",
    "lr_step",
    "policy_tree",
    "remove_policy",
]
