"""What a scaler knows (`ScalerState`), what a step measured (`Signal`), what came of it."""

from __future__ import annotations

import warnings
from enum import IntEnum
from typing import Any, NamedTuple

from polyamp._errors import ScaleFloorError, SkippedStepWarning


class Reason(IntEnum):
    """Why the last transition did what it did."""

    CLEAN = 0
    """Applied; the scale stays."""
    GREW = 1
    """Applied; the scale went up."""
    OVERFLOW = 2
    """Skipped; the scale was cut."""
    TOLERATED = 3
    """Skipped; hysteresis or tolerance spared the scale."""
    FLOOR = 4
    """Skipped; the floor or the threshold limited or forbade the cut."""
    LOSS_NOT_FINITE = 5
    """Skipped; the forward loss itself was infinite or NaN."""
    LOWERED = 6
    """Applied; the scale went down before anything overflowed."""


class Fault(IntEnum):
    """A sticky code for trouble that cannot be raised inside a compiled step."""

    NONE = 0
    """No trouble."""
    AT_FLOOR = 1
    """Overflow where no smaller scale is allowed (`at_floor="fault"`)."""
    MAX_SKIPS = 2
    """`max_skips_in_a_row` steps were skipped one after the other."""


class ScalerState(NamedTuple):
    """State of a loss scaler: 0-d arrays of one framework, or plain Python numbers.

    The same head for every rule. All fields but `memory` are scalars.
    """

    loss_scale: Any
    """f32, positive and finite: the factor the next loss (or backward seed) is multiplied by."""
    clean: Any
    """i32: clean steps since the last change of scale; -1 before a late first window."""
    left: Any
    """i32 >= 1: overflows until the scale is cut (hysteresis), the cutting one included."""
    step: Any
    """i32 >= 0: transitions made."""
    skipped: Any
    """i32 >= 0: steps skipped in all."""
    skipped_in_a_row: Any
    """i32 >= 0: steps skipped since the last applied one."""
    reason: Any
    """i32: `Reason` of the last transition."""
    fault: Any
    """i32: `Fault`; once set it stays until somebody on the host has acted on it."""
    memory: tuple[Any, ...] = ()
    """i32 scalars the rule keeps for itself; see the rule."""


class Signal(NamedTuple):
    """What a backend measured in one step, before anything is applied."""

    finite: Any
    """bool: every gradient is finite, both as it came and after unscaling."""
    loss_finite: Any = True
    """bool: the forward loss is finite. Leave the default where it is not known."""
    amax: Any = None
    """f32: largest |gradient| as it came, still scaled; below 2**-126 it counts as 0. None where
    the rule does not ask for it. Never a substitute for `finite`: XLA's max drops NaN."""
    sub: Any = -1.0
    """f32: share of nonzero gradient entries below 2**-14 in magnitude; -1 where unknown."""


class Decision(NamedTuple):
    """What one transition decided. A skip is read here, never guessed from a smaller scale."""

    scale_used: Any
    """f32: the scale the gradients carried; unscale with this one."""
    applied: Any
    """bool: the update goes ahead; False is a skipped step."""
    next_scale: Any
    """f32: the scale of the next step."""
    reason: Any
    """i32: `Reason`."""


def decision(old: ScalerState, new: ScalerState) -> Decision:
    """The decision that took `old` to `new` (two states one transition apart)."""
    return Decision(old.loss_scale, new.skipped_in_a_row == 0, new.loss_scale, new.reason)


def raise_on_fault(state: ScalerState, module: str | None = None) -> None:
    """Raise `ScaleFloorError` if `state` (on the host) carries a fault, else do nothing.

    Args:
        state: a state whose fields can be read; reading device scalars waits for the device.
        module: name of the first module known to have overflowed.
    """
    fault = int(state.fault)
    if fault == Fault.NONE:
        return
    scale, row = float(state.loss_scale), int(state.skipped_in_a_row)
    what = (
        "no smaller loss scale is allowed"
        if fault == Fault.AT_FLOOR
        else "the limit max_skips_in_a_row is reached"
    )
    where = f" First bad module: {module}." if module else ""
    raise ScaleFloorError(
        f"Gradients keep overflowing: {what} (scale {scale:g}, {row} steps skipped in a row)."
        f"{where} A skipped step writes nothing to the parameters. Look for NaN or infinity in the"
        " data and the forward pass, lower the learning rate, or train in bfloat16 or float32.",
        loss_scale=scale,
        skipped_in_a_row=row,
        module=module,
    )


def warn_of_skips(count: int, scale: float, *, stacklevel: int = 2) -> None:
    """Warn (`SkippedStepWarning`) that `count` steps were skipped since somebody last looked."""
    warnings.warn(
        f"{count} steps were skipped since the last look: a gradient or the loss was not finite"
        f" (loss scale now {scale:g})",
        SkippedStepWarning,
        stacklevel=stacklevel + 1,
    )


def warn_on_skip(row: int, scale: float | None = None, *, stacklevel: int = 2) -> None:
    """Warn (`SkippedStepWarning`) when `row` steps were skipped in a row: at 1, 10, 100 ..."""
    if row > 0 and str(row).rstrip("0") == "1":
        now = "" if scale is None else f" (loss scale now {scale:g})"
        times = "a step was" if row == 1 else f"{row} steps in a row were"
        warnings.warn(
            f"{times} skipped: a gradient or the loss was not finite{now}",
            SkippedStepWarning,
            stacklevel=stacklevel + 1,
        )
