"""How `GradScaler.clip_and_step` clips: one norm, one multiplication.

total       = norm(gradients) / scale                 never overflows, see `measure`
finite      = every gradient is, as it came and unscaled
coefficient = min(1, max_norm / (total + 1e-6))       as torch.nn.utils.clip_grad_norm_
gradients  *= coefficient / scale                     by the fused optimizer, or in one pass
step if finite
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from polyamp._errors import RuleError
from polyamp_torch._grads import combined, is_fused, owned_grads, step_with, tell
from polyamp_torch._inspect import dense
from polyamp_torch._norm import Found, Part, measure, widest

if TYPE_CHECKING:
    from polyamp_torch._stepping import Stepping

Tensor = torch.Tensor

_EPS = 1e-6  # torch's


class Limit(NamedTuple):
    """What `clip_and_step` was asked for: `max_norm` >= 0, `order` > 0, both may be infinite."""

    max_norm: float
    order: float

    @classmethod
    def of(cls, max_norm: Any, norm_type: Any) -> Limit:
        """Check the arguments.

        Raises:
            RuleError: one of them is not a number in its range.
        """
        top, order = _number(max_norm), _number(norm_type)
        if not top >= 0.0:
            raise RuleError(f"max_norm must be a number, 0 or more, got {max_norm!r}")
        if not order > 0.0:
            raise RuleError(
                f"norm_type must be a number above 0, such as 2 or inf, got {norm_type!r}"
            )
        return cls(top, order)

    def coefficient(self, total: Tensor) -> Tensor:
        """What clipping multiplies gradients of norm `total` by: at most 1, NaN of NaN."""
        if math.isinf(self.max_norm):
            return torch.ones_like(total)
        return (self.max_norm / (total + _EPS)).clamp(max=1.0)


def _number(value: Any) -> float:
    if isinstance(value, bool) or (isinstance(value, str) and value != "inf"):
        return math.nan
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


class _Clip(NamedTuple):
    """One call of `clip_and_step`, measured.

    Attributes:
        parts: the gradients, by the scale they carry; the first carries the scaler's.
        found: their norm, and whether they are finite.
        coefficient: 0-d, what clipping multiplies them by.
        own: what the user set as the fused optimizer's `grad_scale`, None for nothing.
        host: whether to look at values.
    """

    parts: list[Part]
    found: Found
    coefficient: Tensor
    own: Any
    host: bool


def clip_and_step(
    scaler: Stepping, optimizer: Optimizer, limit: Limit, error_if_nonfinite: bool
) -> Tensor:
    """Do what `GradScaler.clip_and_step` says."""
    ready = _is_ready(scaler, optimizer)
    fused = is_fused(optimizer)
    grads = owned_grads(optimizer, fp16=fused or not scaler._enabled)
    kinds = {(type(grad), grad.dtype, grad.layout) for grad in grads}
    if any(layout != torch.strided for _, _, layout in kinds):
        scaler._gradients.coalesce(optimizer)
        grads = owned_grads(optimizer, fp16=True)
    if not grads:
        scaler.step(optimizer)
        return torch.zeros(())
    home = scaler._scale if scaler._enabled and scaler._scale is not None else grads[0]
    host = not scaler._on_device(home)
    parts = _parts(scaler, grads, home if ready else None)
    own = getattr(optimizer, "grad_scale", None) if fused else None
    found = measure(parts, limit.order, home.device, host)
    if own is not None:
        found = found._replace(total=found.total / own)
    if error_if_nonfinite and not found.finite.item():
        raise RuntimeError(
            f"clip_and_step: a gradient is not finite (norm {found.total.item()}), so it cannot be"
            " clipped; nothing was changed. Without error_if_nonfinite the step is skipped instead"
        )
    clip = _Clip(parts, found, limit.coefficient(found.total), own, host)
    foldable = fused and len(parts) == 1 and all(kind is Tensor for kind, _, _ in kinds)
    folded = _folded(clip) if foldable else None
    if folded is None:
        _multiply_and_step(scaler, optimizer, clip)
    else:
        _fold_and_step(scaler, optimizer, clip, folded)
    if any(dtype in (torch.float64, torch.complex128) for _, dtype, _ in kinds):
        return found.total
    return found.total.to(torch.float32)


def _is_ready(scaler: Stepping, optimizer: Optimizer) -> bool:
    """Whether the gradients still carry the scale; raises where `step` would."""
    if not scaler._enabled:
        return False
    scaler._check_scale_growth_tracker("clip_and_step")
    stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
    if stage is OptState.STEPPED:
        raise RuntimeError("clip_and_step: the optimizer was stepped since the last update().")
    return bool(stage is OptState.READY)


def _parts(scaler: Stepping, grads: list[Tensor], scale: Tensor | None) -> list[Part]:
    """The gradients that carry `scale`, and those that carry none."""
    if scale is None:
        return [Part(grads, torch.ones((), device=grads[0].device))]
    inverse = scale.to(widest(scale.device)).reciprocal()
    done = scaler._gradients.done(grads)
    if not done:
        return [Part(grads, inverse)]
    one = torch.ones((), device=grads[0].device)
    return [
        Part([grad for grad in grads if id(grad) not in done], inverse),
        Part([grad for grad in grads if id(grad) in done], one),
    ]


def _folded(clip: _Clip) -> Tensor | None:
    """What the fused optimizer is to divide by, f32; None where the host sees it overflow."""
    whole = clip.parts[0].inverse * clip.coefficient
    by = (whole.reciprocal() if clip.own is None else clip.own / whole).to(torch.float32)
    return None if clip.host and math.isinf(by.item()) and clip.coefficient.item() else by


def _fold_and_step(scaler: Stepping, optimizer: Optimizer, clip: _Clip, by: Tensor) -> None:
    grad_scale = None if clip.host and by.item() == 1.0 else by
    if not scaler._enabled:
        step_with(optimizer, grad_scale, torch.zeros_like(by), (), {})
        return
    record = _judged(scaler, optimizer, clip)
    record["folded"] = grad_scale, clip.parts[0].grads
    try:
        scaler.step(optimizer)
    finally:
        record.pop("folded", None)


def _multiply_and_step(scaler: Stepping, optimizer: Optimizer, clip: _Clip) -> None:
    if not scaler._enabled:
        for part in clip.parts:
            multiply(part.grads, clip.coefficient, clip.host)
        optimizer.step()
        return
    finite = clip.found.finite
    bad = finite.logical_not()
    record = _judged(scaler, optimizer, clip)
    if not clip.host or finite.item():
        for part in clip.parts:
            factor = torch.where(finite, part.inverse * clip.coefficient, 1.0)
            multiply(part.grads, factor, clip.host)
        every = [grad for part in clip.parts for grad in part.grads]
        scaler._gradients.mark(optimizer, every, None if clip.host else bad)
        tell(optimizer, "_gradients_unscaled")
    record["stage"] = OptState.UNSCALED
    scaler.step(optimizer)


def _judged(scaler: Stepping, optimizer: Optimizer, clip: _Clip) -> dict[str, Any]:
    """The optimizer's record, with the norm's verdict in it beside any earlier one."""
    record: dict[str, Any] = scaler._per_optimizer_states[id(optimizer)]
    seen = scaler._range(optimizer)
    if seen is not None and record["stage"] is OptState.READY:
        seen.note(clip.parts[0].grads)
    bad = clip.found.finite.logical_not().to(torch.float32)
    earlier = record["found_inf_per_device"].values()
    record["found_inf_per_device"] = {bad.device: combined([*earlier, bad], bad.device)}
    return record


@torch.no_grad()
def multiply(grads: Iterable[Any], factor: Tensor, host: bool) -> None:
    """Multiply gradients in place by a 0-d factor.

    Products of low-precision values are computed in float32 and rounded once.

    Args:
        grads: dense or sparse and coalesced; of one that is spread over processes, the own part.
        factor: f32 or f64.
        host: leave it where the factor is 1.
    """
    if host and factor.item() == 1.0:
        return
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for grad in grads:
        value = dense(grad.to_local() if hasattr(grad, "to_local") else grad)
        groups[value.device, value.dtype].append(value)
    for (device, dtype), values in groups.items():
        if dtype == torch.float64:
            torch._foreach_mul_(values, factor.to(device, torch.float64))
        else:
            unread = torch.zeros((), device=device)
            by = factor.to(device, torch.float32)
            torch._amp_foreach_non_finite_check_and_unscale_(values, unread, by)
