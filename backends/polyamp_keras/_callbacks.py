"""What `fit` tells about skipped steps."""

from __future__ import annotations

from typing import Any

import keras

from polyamp_keras._scaler import LossScaleOptimizer


class CheckScaling(keras.callbacks.Callback):  # type: ignore[misc]
    """Report skipped steps at the end of each epoch, and stop where the rule gave up.

    Raises (out of `fit`):
        ScaleFloorError: as `LossScaleOptimizer.check`.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Warn of the epoch's skips, raise a fault; write the scale to the logs as "scale"."""
        optimizer = self.model.optimizer
        if isinstance(optimizer, LossScaleOptimizer):
            optimizer.check()
            if logs is not None:
                logs["scale"] = optimizer.state.loss_scale
