"""The loss scalers of other systems, restated in our own words from what those systems do.

Each is a small mutable object: `step(overflow)` makes one decision (False where the system would
raise), `scale` is in force for the next loss, `save()` is what that system writes into its
checkpoint, `config` what the run was set up with, in that system's words. They are the judges of
imported scalers, so nothing here is taken from polyamp.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

START, WINDOW, FLOOR = 256.0, 3, 16.0


class Torch:
    system = "torch"
    config: ClassVar[Any] = None

    def __init__(self) -> None:
        self.scale, self.good = START, 0

    def step(self, overflow: bool) -> bool:
        if overflow:
            self.scale, self.good = self.scale * 0.5, 0
            return True
        self.good += 1
        if self.good == WINDOW:
            self.scale, self.good = self.scale * 2.0, 0
        return True

    def save(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": WINDOW,
            "_growth_tracker": self.good,
        }


class Keras(Torch):
    system = "keras"
    config: ClassVar[Any] = {"dynamic_growth_steps": WINDOW}

    def save(self) -> dict[str, Any]:
        return {"dynamic_scale": np.float32(self.scale), "step_counter": np.int32(self.good)}


class Apex(Torch):
    """Its window is always 2000 steps, so a run begins shortly before growth."""

    system = "apex"
    config: ClassVar[Any] = {"min_loss_scale": FLOOR, "max_loss_scale": 1024.0}

    def __init__(self) -> None:
        self.scale, self.good = START, 2000 - WINDOW

    def step(self, overflow: bool) -> bool:
        if overflow:
            self.scale, self.good = max(self.scale / 2.0, FLOOR), 0
            return True
        self.good += 1
        if self.good == 2000:
            self.scale, self.good = min(self.scale * 2.0, 1024.0), 0
        return True

    def save(self) -> dict[str, Any]:
        return {"loss_scaler0": {"loss_scale": self.scale, "unskipped": self.good}}


class Flax(Torch):
    """Compares before it counts, so growth takes one clean step more."""

    system = "flax"

    def step(self, overflow: bool) -> bool:
        due = self.good == WINDOW
        if overflow:
            self.scale = max(self.scale * 0.5, FLOOR)
        elif due:
            self.scale *= 2.0
        self.good = 0 if due or overflow else self.good + 1
        return True

    def save(self) -> dict[str, Any]:
        return {
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": WINDOW,
            "fin_steps": self.good,
            "scale": self.scale,
            "minimum_scale": FLOOR,
        }


class Jmp(Torch):
    system = "jmp"

    def step(self, overflow: bool) -> bool:
        super().step(overflow)
        self.scale = max(self.scale, FLOOR)
        return True

    def save(self) -> dict[str, Any]:
        return {
            "loss_scale": np.float32(self.scale),
            "counter": np.int32(self.good),
            "period": WINDOW,
            "factor": 2,
            "min_loss_scale": np.float32(FLOOR),
        }


class DeepSpeedZero:
    system = "deepspeed-zero"
    config: ClassVar[Any] = None
    spares, refill, raises = 2, False, True

    def __init__(self) -> None:
        self.scale, self.now, self.last_bad, self.lives = START, 0, -1, self.spares

    def step(self, overflow: bool) -> bool:
        if overflow:
            if self.lives > 1:
                self.lives -= 1
            elif self.scale == FLOOR and self.raises:
                return False
            else:
                self.scale = max(self.scale / 2.0, FLOOR)
            self.last_bad = self.now
        else:
            quiet = self.now - self.last_bad - 1
            due = quiet > 0 and quiet % WINDOW == 0
            if due or self.refill:
                self.lives = self.spares
            if due:
                self.scale *= 2.0
        self.now += 1
        return True

    def save(self) -> dict[str, Any]:
        return {
            "loss_scaler": {
                "cur_scale": self.scale,
                "dynamic": True,
                "cur_iter": self.now,
                "last_overflow_iter": self.last_bad,
                "scale_factor": 2.0,
                "scale_window": WINDOW,
                "min_scale": FLOOR,
                "delayed_shift": self.spares,
                "cur_hysteresis": self.lives,
                "consecutive_hysteresis": self.refill,
                "raise_error_at_min_scale": self.raises,
            }
        }


class DeepSpeedZeroConsecutive(DeepSpeedZero):
    refill = True


class DeepSpeedZeroClamped(DeepSpeedZero):
    spares, raises = 3, False


class DeepSpeedStage0(DeepSpeedZero):
    system = "deepspeed-stage0"
    config: ClassVar[Any] = {
        "fp16": {"enabled": True, "loss_scale_window": WINDOW, "min_loss_scale": FLOOR}
    }
    spares, raises = 1, False

    def save(self) -> dict[str, Any]:
        return {
            "dynamic_loss_scale": True,
            "cur_scale": self.scale,
            "cur_iter": self.now,
            "last_overflow_iter": self.last_bad,
            "scale_factor": 2.0,
            "scale_window": WINDOW,
        }


class DeepSpeedStage0Newer(DeepSpeedStage0):
    """The fused optimizer since it honours hysteresis."""

    config: ClassVar[Any] = {"fp16": {"enabled": True, "hysteresis": 3, "min_loss_scale": FLOOR}}
    spares = 3

    def save(self) -> dict[str, Any]:
        return {**super().save(), "cur_hysteresis": self.lives}


class Megatron:
    system = "megatron"
    config: ClassVar[Any] = {"loss_scale_window": WINDOW, "min_loss_scale": FLOOR, "hysteresis": 2}

    def __init__(self) -> None:
        self.scale, self.good, self.lives = START, 0, 2

    def step(self, overflow: bool) -> bool:
        if overflow:
            self.good = 0
            self.lives -= 1
            if self.lives <= 0:
                self.scale = max(self.scale * 0.5, FLOOR)
            return True
        self.good += 1
        if self.good == WINDOW:
            self.good, self.lives, self.scale = 0, 2, self.scale * 2.0
        return True

    def save(self) -> dict[str, Any]:
        return {
            "scale": np.array([self.scale], np.float32),
            "growth_tracker": self.good,
            "hysteresis_tracker": self.lives,
        }


class Nemo(Torch):
    system = "nemo"
    config: ClassVar[Any] = {"hysteresis": 2}

    def __init__(self) -> None:
        super().__init__()
        self.lives = 2

    def step(self, overflow: bool) -> bool:
        if not overflow:
            self.lives = 2
            return super().step(False)
        self.lives -= 1
        if self.lives <= 0:
            return super().step(True)
        self.good = 0
        return True

    def save(self) -> dict[str, Any]:
        return {**super().save(), "_hysteresis_tracker": self.lives}


class ColossalAI(Megatron):
    """`load` is what the system itself goes on with: its counts are not saved."""

    system = "colossalai"
    config: ClassVar[Any] = {"growth_interval": WINDOW, "min_scale": FLOOR, "max_scale": 1024.0}

    def step(self, overflow: bool) -> bool:
        super().step(overflow)
        self.scale = min(self.scale, 1024.0)
        return True

    def save(self) -> dict[str, Any]:
        return {
            "scale": np.array([self.scale], np.float32),
            "growth_factor": 2,
            "backoff_factor": 0.5,
            "hysteresis": 2,
        }

    def load(self) -> ColossalAI:
        again = type(self)()
        again.scale = self.scale
        return again


class Fairseq:
    system = "fairseq"
    config: ClassVar[Any] = {
        "fp16_scale_window": WINDOW,
        "min_loss_scale": FLOOR,
        "fp16_scale_tolerance": 0.0,
    }
    tolerance, threshold = 0.0, 0.0

    def __init__(self) -> None:
        self.scale, self.window = START, WINDOW
        self.now, self.last_bad, self.last_change, self.bad = 0, -1, -1, 0

    def grown(self) -> None:
        pass

    def cut(self) -> None:
        pass

    def step(self, overflow: bool) -> bool:
        before = self.scale
        if not overflow:
            if (self.now - self.last_bad) % self.window == 0:
                self.scale *= 2.0
                self.last_change = self.now
                self.grown()
        else:
            self.last_bad = self.now
            self.bad += 1
            if self.bad / (self.now - self.last_change) >= self.tolerance:
                self.scale = max(self.scale / 2.0, self.threshold)
                self.last_change, self.bad = self.now, 0
                self.cut()
            if self.at_floor():
                self.scale = before
                if self.system == "fairseq":
                    return False
        self.now += 1
        return True

    def at_floor(self) -> bool:
        return self.scale <= FLOOR

    def save(self) -> dict[str, Any]:
        return {"loss_scale": self.scale}

    def load(self) -> Fairseq:
        again = type(self)()
        again.scale = self.scale
        return again


class FairseqTolerant(Fairseq):
    config: ClassVar[Any] = {**Fairseq.config, "fp16_scale_tolerance": 0.4}
    tolerance = 0.4


class FairseqThreshold(Fairseq):
    config: ClassVar[Any] = {**Fairseq.config, "threshold_loss_scale": 32.0}
    threshold = 32.0


class Metaseq(Fairseq):
    system = "metaseq"

    def grown(self) -> None:
        self.window *= 2

    def cut(self) -> None:
        self.window = max(self.window // 2, 1)

    def at_floor(self) -> bool:
        return self.scale < FLOOR


SCALERS: tuple[Any, ...] = (
    Torch,
    Keras,
    Apex,
    Flax,
    Jmp,
    DeepSpeedZero,
    DeepSpeedZeroConsecutive,
    DeepSpeedZeroClamped,
    DeepSpeedStage0,
    DeepSpeedStage0Newer,
    Megatron,
    Nemo,
    ColossalAI,
    Fairseq,
    FairseqTolerant,
    FairseqThreshold,
    Metaseq,
)
