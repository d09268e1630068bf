"""How GradScaler unscales, judges and steps: plain and fused optimizers, alone and together."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from polyamp._errors import StateError
from polyamp_torch._clip import Limit, clip_and_step
from polyamp_torch._grads import (
    Gradients,
    all_plain,
    combined,
    is_fused,
    needs_host_decision,
    step_with,
    tell,
)
from polyamp_torch._inspect import Range
from polyamp_torch._state import Keeper

Tensor = torch.Tensor


class Stepping(torch.amp.GradScaler):
    """The part of `GradScaler` that touches gradients and optimizers."""

    _keeper: Keeper
    _gradients: Gradients
    _results: dict[int, tuple[Any, Any]]
    _losses: list[Tensor]
    _force_device_mode: bool

    def _on_device(self, tensor: Tensor) -> bool:
        return self._force_device_mode or tensor.device.type != "cpu"

    def _may_amplify(self, inverse: Tensor) -> bool:
        if self._on_device(inverse):
            return self._keeper.rule.min_scale < 1.0
        return inverse.item() > 1.0

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        twice, seen = self._may_amplify(inv_scale), self._range(optimizer)
        return self._gradients.unscale_(optimizer, inv_scale, found_inf, allow_fp16, twice, seen)

    def _range(self, optimizer: Optimizer) -> Range | None:
        """Where this iteration's gradients are noted, if the rule asks for their range."""
        if not self._keeper.rule.wants_amax:
            return None
        record = self._per_optimizer_states[id(optimizer)]
        seen: Range = record.setdefault("range", Range(self._keeper.sub_is_due()))
        return seen

    @torch.no_grad()
    def _note_losses(self, outputs: Any) -> None:
        """Note whether what is scaled is finite, if the rule leaves forward NaN alone; if not, the
        step is skipped, whatever the gradients are."""
        if isinstance(outputs, Tensor):
            if self._keeper.rule.wants_amax:
                self._losses.append(torch.isfinite(outputs).all())
        elif isinstance(outputs, (list, tuple)):
            for output in outputs:
                self._note_losses(output)
        elif isinstance(outputs, Mapping):
            self._note_losses(list(outputs.values()))

    def _lost(self) -> list[Tensor]:
        """0-d flags, 1 where what was scaled in this iteration is not finite: it is skipped too."""
        return [finite.logical_not().to(torch.float32) for finite in self._losses]

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Tensor]:
        return self._check_inf(optimizer, self._gradients.owned(optimizer))

    def _check_inf(self, optimizer: Optimizer, grads: list[Tensor]) -> dict[Any, Tensor]:
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        inverse = _inverse(scale)
        amplifies, seen = self._may_amplify(inverse), self._range(optimizer)
        flags = self._gradients.check(grads, inverse, amplifies, seen)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = flags
        return flags

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale (unless `unscale_` was called) and step, or skip if a gradient is not finite.

        Args:
            optimizer: an optimizer whose gradients carry the current scale.
            *args, **kwargs: passed on to `optimizer.step`.

        Returns:
            What `optimizer.step` returns; None if the step was skipped on the host. Whether it was
            is `applied(optimizer)`.

        Raises:
            RuntimeError: a closure was passed; or a second step before `update`.
            AssertionError: `scale` was not called, or no gradient was found (as torch).
            ValueError: float16 gradients and an optimizer that cannot unscale them itself.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or any(callable(a) for a in args):
            raise RuntimeError(
                "step() takes no closure: it would run backward without the scale."
                " Compute the gradients first, then call step(optimizer)"
            )
        record = self._per_optimizer_states[id(optimizer)]
        try:
            if is_fused(optimizer):
                result = self._fused_step(optimizer, *args, **kwargs)
                tell(optimizer, "_iteration_over")
                return result
            result = super().step(optimizer, *args, **kwargs)
        except BaseException:
            if record["stage"] is OptState.UNSCALED:  # its gradients are marked: not twice
                record["stage"] = OptState.READY
            raise
        self._gradients.settle(optimizer)
        if "skipped" not in record:  # a subclass, or the optimizer, decided in its own way
            flags = list(record["found_inf_per_device"].values())
            self._remember(optimizer, combined(flags, flags[0].device) if flags else None)
        tell(optimizer, "_iteration_over")
        return result

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        flags = [*optimizer_state["found_inf_per_device"].values(), *self._lost()]
        bad = combined(flags, flags[0].device).item() != 0.0
        result = None if bad else optimizer.step(*args, **kwargs)
        self._remember(optimizer, not bad)
        optimizer_state["skipped"] = bad
        return result

    def _fused_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        scale, _ = self._check_scale_growth_tracker("step")
        record = self._per_optimizer_states[id(optimizer)]
        if record["stage"] is OptState.STEPPED:
            raise RuntimeError("stepped already: call update() before the next step()")
        own, grads = record.get("folded") or self._checked(optimizer, record, scale)
        flags = (*record["found_inf_per_device"].values(), *self._lost())
        found_inf = combined(flags, scale.device)
        if self._must_skip(optimizer, found_inf):
            record["stage"] = OptState.STEPPED
            self._remember(optimizer, False)
            return None
        result = step_with(optimizer, own, found_inf, args, kwargs)
        if record["stage"] is OptState.READY and _writes_back(optimizer):
            self._gradients.mark(optimizer, grads, found_inf)
        record["stage"] = OptState.STEPPED
        self._remember(optimizer, found_inf)
        self._gradients.settle(optimizer)
        return result

    def _checked(
        self, optimizer: Optimizer, record: dict[str, Any], scale: Tensor
    ) -> tuple[Any, list[Tensor]]:
        """What a fused step is to divide by, and its gradients, once they were looked at."""
        grads = self._gradients.owned(optimizer)
        if record["stage"] is OptState.READY:
            if self._gradients.done(grads) or not all_plain(grads):
                start = combined(record["found_inf_per_device"].values(), scale.device)
                record["found_inf_per_device"] = self._unscale_grads_(
                    optimizer, _inverse(scale), start, True
                )
                record["stage"] = OptState.UNSCALED
            elif record.get("agreed"):
                pass
            elif type(self)._check_inf_per_device is Stepping._check_inf_per_device:
                self._check_inf(optimizer, grads)
            else:  # a subclass has its own
                self._check_inf_per_device(optimizer)
        own = getattr(optimizer, "grad_scale", None)
        if record["stage"] is OptState.READY:
            own = scale.clone() if own is None else scale * own
        return own, grads

    def _must_skip(self, optimizer: Optimizer, found_inf: Tensor) -> bool:
        """Whether the fused step is to be skipped on the host; reads the flag only if it must."""
        if self._on_device(found_inf):
            return needs_host_decision(optimizer) and bool(found_inf.item())
        return bool(found_inf.item()) and needs_host_decision(optimizer)

    def clip_and_step(
        self,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Unscale, clip the norm of the optimizer's gradients and step, or skip: in fewer passes.

        It does what `unscale_`, `torch.nn.utils.clip_grad_norm_` and `step` do one after another.
        The norm is also the check for what is not finite, and unscaling and clipping are one
        multiplication, which a fused optimizer does itself. After `unscale_` it only clips and
        steps; with scaling disabled likewise, and then nothing is skipped.

        A norm beyond float32 is no overflow: finite gradients are clipped to `max_norm` whatever
        their size. (A fused step on an accelerator takes gradients for zero once
        scale * norm / max_norm leaves float32; the host never does.) A skipped step leaves
        gradients as they came.

        Args:
            optimizer: its gradients, of all groups together, are clipped. They carry the current
                scale; those that `unscale_` or another optimizer's step unscaled do not.
            max_norm: largest norm of the unscaled gradients; 0 or more, inf to only measure.
            norm_type: order of the norm: a number above 0, or inf.
            error_if_nonfinite: raise where a gradient is not finite; on an accelerator this waits.

        Returns:
            The norm before clipping, without the scale: 0-d, f32 (f64 if a gradient is), on the
            scale's device; inf or NaN where a gradient is, inf where it is beyond float32.

        Raises:
            RuleError: `max_norm` or `norm_type` is out of range.
            RuntimeError: a gradient is not finite and `error_if_nonfinite` is set: nothing is
                changed; or a second step before `update`.
            AssertionError, ValueError: as `step`.
        """
        return clip_and_step(self, optimizer, Limit.of(max_norm, norm_type), error_if_nonfinite)

    def step_all(self, optimizers: Iterable[Optimizer]) -> list[Any]:
        """Step several optimizers together: all of them, or none if one has a bad gradient.

        Args:
            optimizers: distinct optimizers, none of them stepped since the last `update`.

        Returns:
            What each `optimizer.step` returns, in order.

        Raises:
            StateError: an optimizer is listed twice, or none is.
            RuntimeError, AssertionError, ValueError: as `step`, before anything is stepped.
        """
        together = list(optimizers) if isinstance(optimizers, Iterable) else []
        if not together or len({id(o) for o in together}) != len(together):
            raise StateError(
                f"step_all() needs one or more distinct optimizers, got {len(together)} with"
                f" {len({id(o) for o in together})} distinct"
            )
        if not self._enabled:
            return [optimizer.step() for optimizer in together]
        scale, _ = self._check_scale_growth_tracker("step_all")
        records = [self._per_optimizer_states[id(o)] for o in together]
        if any(record["stage"] is OptState.STEPPED for record in records):
            raise RuntimeError("stepped already: call update() before the next step()")
        for optimizer, record in zip(together, records, strict=True):
            if record["stage"] is not OptState.READY:
                continue
            if is_fused(optimizer) and all_plain(self._gradients.owned(optimizer)):
                self._check_inf_per_device(optimizer)
            else:
                self.unscale_(optimizer)
        flags = [f for record in records for f in record["found_inf_per_device"].values()]
        agreed = combined(flags, scale.device)
        for record in records:
            record["found_inf_per_device"] = {scale.device: agreed}
            record["agreed"] = True
        return [self.step(optimizer) for optimizer in together]

    def applied(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's last `step` was applied, not skipped.

        Costs nothing where the step was decided on the host; waits for the device after a fused
        step there. Always true while scaling is disabled.

        Raises:
            StateError: the optimizer was not stepped through this scaler.
        """
        if not self._enabled:
            return True
        known, result = self._results.get(id(optimizer), (None, None))
        if result is None or known != _reference(optimizer):
            raise StateError(
                "applied() knows nothing of this optimizer: call scaler.step(optimizer) first. (One"
                " whose step takes grad_scaler= and never unscales through it stays unknown.)"
            )
        if isinstance(result, Tensor):
            result = not result.item()
            self._remember(optimizer, result)
        return bool(result)

    def _remember(self, optimizer: Optimizer, result: Any) -> None:
        """Whether the step was applied: a bool, a found_inf flag, or None where nobody knows.

        A schedule may know the optimizer inside a wrapper (MasterWeights) alone.
        """
        inner = getattr(optimizer, "inner", None)
        for known in (optimizer, inner) if isinstance(inner, Optimizer) else (optimizer,):
            self._results[id(known)] = (_reference(known), result)


def _reference(optimizer: Any) -> Any:
    """What tells an optimizer from a later one with the same id, if anything does."""
    try:
        return weakref.ref(optimizer)
    except TypeError:
        return type(optimizer)


def _inverse(scale: Tensor) -> Tensor:
    if scale.device.type == "mps":  # which has no float64
        return scale.reciprocal()
    return scale.double().reciprocal().float()


def _writes_back(optimizer: Optimizer) -> bool:
    """Whether a fused step leaves the gradients unscaled, as torch's own kernels do."""
    return type(optimizer).__module__.startswith("torch.optim")
