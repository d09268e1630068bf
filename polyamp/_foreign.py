"""Scalers of other systems, read and written: `import_scaler` and `export_scaler`.

Every system is parameters of `Dynamic` (see `polyamp.presets`) and a saved form of its state. An
imported scaler goes on exactly as the system that saved it would have.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal

from polyamp._scaling import Rule
from polyamp._state import ScalerState

Part = Literal["state", "config"]
"""What is written: the running state, or the configuration."""


def import_scaler(
    source: Any,
    system: str | None = None,
    *,
    rule: Rule | Mapping[str, Any] | None = None,
    at: str | None = None,
) -> tuple[Rule, ScalerState]:
    """The rule and the state, in Python numbers, of another system's loss scaler.

    Args:
        source: what that system saved (a dict, also the whole checkpoint around it), its scaler
            object, its configuration, or a path to a file: JSON, a torch checkpoint, `.keras`,
            `.weights.h5`. Files are never unpickled; see docs/convert.md.
        system: "torch", "keras", "flax", "jmp", "deepspeed-stage0", "deepspeed-zero", "megatron",
            "nemo", "apex", "colossalai", "fairseq", "metaseq", "lightning" or "accelerate"; told
            from the keys where they allow it.
        rule: what the system's saved state leaves out: its configuration in its own words, such
            as `{"loss_scale_window": 500}`, or a rule. Its defaults where it is not given, with a
            warning. What the state itself holds comes first.
        at: dotted keys under which the scaler lies, where it is not one of the usual places.

    Returns:
        `(rule, state)`, as `scaler_from_dict`. `step` and the counts of skips start at 0.

    Raises:
        StateError: nothing known is there, more than one thing could be meant, a value cannot be
            right, or a file would have to be unpickled.
    """
    from polyamp._foreign_read import read_source

    found, notes = read_source(source, system, rule, at)
    for note in notes:
        warnings.warn(note, UserWarning, stacklevel=2)
    return found


def export_scaler(
    rule: Rule,
    state: ScalerState,
    system: str,
    *,
    part: Part = "state",
    lossy: bool = False,
) -> dict[str, Any]:
    """A scaler in the saved form of another system, as Python numbers.

    Args:
        rule: `Dynamic` or `Static`.
        state: its state; device scalars are read.
        system: as in `import_scaler`, or "polyamp" for the portable form.
        part: "state", what the system's own state_dict or fields hold, or "config", its
            configuration in its own words.
        lossy: leave out what the system cannot do, with a warning, in place of an error.

    Returns:
        A new dict, fit for JSON.

    Raises:
        StateError: the system cannot do what `rule` says; the message names what would be lost.
    """
    from polyamp._foreign_write import write

    data, notes = write(rule, state, system, part, lossy)
    for note in notes:
        warnings.warn(note, UserWarning, stacklevel=2)
    return data
