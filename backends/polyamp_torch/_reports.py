"""What GradScaler tells of skipped steps and faults."""

from __future__ import annotations

from typing import Any

from polyamp._state import ScalerState, raise_on_fault, warn_of_skips, warn_on_skip
from polyamp_torch._knobs import Knobs


class Reports(Knobs):
    """The part of `GradScaler` that warns and raises."""

    _told: int
    """Skipped steps that were warned about, or will not be."""
    _known_row: int
    """Steps skipped in a row, as far as the host knows."""

    def _report(self, state: ScalerState, stacklevel: int) -> None:
        if state.fault:
            self._keeper.clear_fault()
            raise_on_fault(state)
        fresh, self._told = state.skipped - self._told, state.skipped
        if fresh > 1:  # several since the last look, on a device
            warn_of_skips(fresh, state.loss_scale, stacklevel=stacklevel + 1)
        elif fresh == 1:
            warn_on_skip(state.skipped_in_a_row, state.loss_scale, stacklevel=stacklevel + 1)

    def _warn_of_known_skips(self, records: list[dict[str, Any]]) -> None:
        known = [record["skipped"] for record in records if "skipped" in record]
        if known:
            self._known_row = self._known_row + 1 if any(known) else 0
            self._told += any(known)
            warn_on_skip(self._known_row, stacklevel=3)
