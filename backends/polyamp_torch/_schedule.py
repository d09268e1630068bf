"""Learning-rate schedules that wait on skipped steps."""

from __future__ import annotations

from typing import Any

from polyamp._errors import StateError
from polyamp_torch._scaler import GradScaler


def lr_step(scheduler: Any, scaler: GradScaler, *args: Any, **kwargs: Any) -> bool:
    """Step a learning-rate scheduler unless its optimizer's last step was skipped.

    For schedules that count iterations: call it once an iteration, after `scaler.update()`; one
    that counts epochs is stepped as ever. After a fused step on an accelerator it waits for that.

    Args:
        scheduler: a torch scheduler; its `optimizer` must have been stepped through `scaler`.
        *args, **kwargs: passed on to `scheduler.step` (ReduceLROnPlateau's metric).

    Returns:
        Whether the scheduler was stepped.

    Raises:
        StateError: the optimizer was not stepped through `scaler`, or `scaler` is not polyamp's.
    """
    if not isinstance(scaler, GradScaler):
        raise StateError(
            f"lr_step(scheduler, scaler) needs polyamp's GradScaler, got {type(scaler).__name__}"
        )
    applied = scaler.applied(scheduler.optimizer)
    if applied:
        scheduler.step(*args, **kwargs)
    return applied
