"""What one step's gradients hold: finite or not, before and after unscaling, and how large."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from polyamp._errors import RuleError
from polyamp._state import Signal
from polyamp_torch import _triton

Tensor = torch.Tensor

_SMALLEST_NORMAL_F16 = 2.0**-14


def dense(grad: Tensor) -> Tensor:
    """The stored values of a gradient: itself, a sparse one's values, complex as pairs of reals."""
    values = grad._values() if grad.is_sparse else grad
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def amaxes(values: Sequence[Tensor]) -> dict[torch.device, Tensor]:
    """Largest magnitude of non-empty real tensors, per device: 0-d, f32 (f64 if one is f64).

    NaN and infinity come through. Nothing waits for the device. One `aminmax` per tensor on the
    CPU, where it costs less than the native finite check; elsewhere one Triton kernel for all, or
    one foreach norm for each dtype.
    """
    per_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for value in values:
        per_device[value.device].append(value)
    return {device: _amax(tensors) for device, tensors in per_device.items()}


def _amax(values: list[Tensor]) -> Tensor:
    if _triton.usable(values):
        return _triton.one_pass(values).amax
    groups: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for value in values:
        groups[value.dtype].append(value)
    tops = []
    for dtype, tensors in groups.items():
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        if values[0].device.type == "cpu":
            ends = [end for t in tensors for end in torch.aminmax(t)]
        else:
            ends = list(torch._foreach_norm(tensors, float("inf")))
        tops.append(torch.stack(ends).abs().amax().to(wide))
    return torch.stack(_same_width(tops)).amax()


def _same_width(tensors: list[Tensor]) -> list[Tensor]:
    wide = max((t.dtype for t in tensors), key=lambda dtype: dtype.itemsize)
    return [t.to(wide) for t in tensors]


def judge(amax: Tensor, inverse: Tensor) -> Tensor:
    """0-d bool: finite as it came and after the multiplication by `inverse`, that unscales it."""
    return torch.isfinite(amax) & torch.isfinite(amax * inverse.to(amax.device, non_blocking=True))


@torch.no_grad()
def inspect(
    grads: Iterable[Tensor | None],
    loss_scale: Any,
    loss: Tensor | None = None,
    amax: bool = False,
    sub: bool = False,
) -> Signal:
    """Measure gradients that still carry `loss_scale`. No host sync.

    Args:
        grads: gradient tensors of any device, floating or complex dtype, dense or sparse; None
            entries and empty tensors are passed over.
        loss_scale: the scale they carry: float or 0-d f32 tensor.
        loss: the unscaled loss; `loss_finite` stays True where it is not given.
        amax: also give the largest magnitude, as it came.
        sub: also give the share of nonzero entries below 2**-14 in magnitude.

    Returns:
        A Signal of 0-d tensors on the device of the first gradient (the CPU if there is none; no
        gradient at all is finite, with amax 0).
        `finite` judges every gradient as it came and unscaled.
    """
    values = [v for g in grads if g is not None and (v := dense(g)).numel()]
    home = values[0].device if values else torch.device("cpu")
    scale = _on(loss_scale, home)
    largest = list(amaxes(values).items())
    finite = torch.ones((), dtype=torch.bool, device=home)
    for _, top in largest:
        finite = finite & judge(top, scale.reciprocal()).to(home)
    signal = Signal(finite)
    if loss is not None:
        signal = signal._replace(loss_finite=torch.isfinite(loss.detach()).all().to(home))
    if amax:
        top = torch.zeros((), dtype=torch.float32, device=home)
        for _, other in largest:
            top = torch.maximum(top, as_f32(other).to(home))
        signal = signal._replace(amax=top)
    return signal._replace(sub=share(values, home)) if sub else signal


def _on(value: Any, home: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(home, torch.float32, non_blocking=home.type != "cpu")
    return torch.full((), value, dtype=torch.float32, device=home)


def as_f32(amax: Tensor) -> Tensor:
    """A magnitude in f32: finite ones stay finite."""
    limit = torch.finfo(torch.float32).max
    narrow = amax.clamp(max=limit) if amax.dtype == torch.float64 else amax
    return torch.where(torch.isinf(amax), amax, narrow).to(torch.float32)


def share(values: list[Tensor], home: torch.device) -> Tensor:
    """Of the nonzero entries, the share below 2**-14 in magnitude: 0-d f32, -1 of none."""
    small = torch.zeros((), dtype=torch.int64, device=home)
    nonzero = torch.zeros((), dtype=torch.int64, device=home)
    for value in values:
        size = value.abs()
        small += ((size > 0) & (size < _SMALLEST_NORMAL_F16)).sum().to(home)
        nonzero += torch.count_nonzero(size).to(home)
    found = small.to(torch.float32) / nonzero.clamp(min=1)
    return torch.where(nonzero > 0, found, torch.full_like(found, -1.0))


@dataclass
class Range:
    """What a rule that follows the gradients' range is told of one optimizer's."""

    wants_sub: bool
    amax: dict[torch.device, Tensor] = field(default_factory=dict)
    """Largest magnitude as it came, per device: 0-d."""
    sub: list[Tensor] = field(default_factory=list)
    """Shares of underflow, 0-d f32."""

    def note(self, grads: Iterable[Tensor]) -> dict[torch.device, Tensor]:
        """Measure gradients that still carry the scale; returns their largest magnitudes.

        Raises:
            RuleError: one of them is a DTensor, of which this rank has a part only.
        """
        values = _stored(grads)
        found = amaxes(values)
        self.amax.update(found)
        self._note_share(values)
        return found

    def note_and_unscale(
        self, grads: Iterable[Tensor], inverse: Tensor, found_inf: Tensor
    ) -> dict[torch.device, Tensor] | None:
        """The same, and multiply them by `inverse` in place, in one pass over them.

        Returns:
            A 0-d f32 flag of their device: `found_inf`, or 1 where one is not finite, as it came or
            once unscaled. None: nothing was done, this takes several passes.

        Raises:
            RuleError: as `note`.
        """
        values = _stored(grads)
        if len({value.device for value in values}) != 1 or not _triton.usable(values):
            return None
        self._note_share(values)
        home = values[0].device
        found = _triton.one_pass(values, inverse.to(home, non_blocking=True))
        self.amax[home] = found.amax
        bad = found.finite.logical_not().to(torch.float32)
        return {home: torch.maximum(bad, found_inf.to(home, non_blocking=True))}

    def _note_share(self, values: list[Tensor]) -> None:
        if self.wants_sub and values:
            self.sub.append(share(values, values[0].device))


def _stored(grads: Iterable[Tensor]) -> list[Tensor]:
    values = []
    for grad in grads:
        if hasattr(grad, "to_local"):
            raise RuleError(
                "the largest gradient of a DTensor is not measured: use a rule that needs no amax,"
                ' such as Dynamic() or "torch"'
            )
        values.append(dense(grad))
    return [value for value in values if value.numel()]


def signal_of(finite: Tensor, records: Iterable[dict[str, Any]], losses: list[Tensor]) -> Signal:
    """What was measured in this iteration, of all optimizers together, on the flag's device.

    `losses` are flags, 0-d bool: what was scaled was finite.
    """
    signal, seen = Signal(finite), [r["range"] for r in records if "range" in r]
    tops = [top for one in seen for top in one.amax.values()]
    shares = [share for one in seen for share in one.sub]
    if seen:  # of gradients without entries there is none
        top = _together(tops, finite.device) if tops else torch.zeros((), device=finite.device)
        signal = signal._replace(amax=as_f32(top))
    if losses:
        lost = _together([flag.logical_not() for flag in losses], finite.device)
        signal = signal._replace(loss_finite=lost.logical_not())
    return signal._replace(sub=_together(shares, finite.device)) if shares else signal


def _together(values: list[Tensor], home: torch.device) -> Tensor:
    # A copy to the CPU that does not wait could be read before it has arrived.
    return torch.stack([v.to(home, non_blocking=home.type != "cpu") for v in values]).amax()
