"""`import polyamp.torch as amp`: the PyTorch face of polyamp (needs torch)."""

from polyamp_torch import GradScaler as GradScaler
from polyamp_torch import autocast as autocast
from polyamp_torch import lr_step as lr_step

__all__ = ["GradScaler", "autocast", "lr_step"]
