"""How GradScaler unscales, judges and steps: plain and fused optimizers, alone and together."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from polyamp._errors import StateError
from polyamp_torch._grads import Gradients, all_plain, combined, needs_host_decision
from polyamp_torch._state import Keeper

Tensor = torch.Tensor


class Stepping(torch.amp.GradScaler):
    """The part of `GradScaler` that touches gradients and optimizers."""

    _keeper: Keeper
    _gradients: Gradients
    _results: dict[int, tuple[Any, Any]]
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
        twice = self._may_amplify(inv_scale)
        return self._gradients.unscale_(optimizer, inv_scale, found_inf, allow_fp16, twice)

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Tensor]:
        return self._check_inf(optimizer, self._gradients.owned(optimizer))

    def _check_inf(self, optimizer: Optimizer, grads: list[Tensor]) -> dict[Any, Tensor]:
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        inverse = _inverse(scale)
        flags = self._gradients.check(grads, inverse, self._may_amplify(inverse))
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
            if _is_fused(optimizer):
                return self._fused_step(optimizer, *args, **kwargs)
            result = super().step(optimizer, *args, **kwargs)
        except BaseException:
            if record["stage"] is OptState.UNSCALED:  # its gradients are marked: not twice
                record["stage"] = OptState.READY
            raise
        self._gradients.settle(optimizer)
        if "skipped" not in record:  # a subclass, or the optimizer, decided in its own way
            flags = list(record["found_inf_per_device"].values())
            self._remember(optimizer, combined(flags, flags[0].device) if flags else None)
        return result

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        flags = list(optimizer_state["found_inf_per_device"].values())
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
        ready = record["stage"] is OptState.READY
        grads = self._gradients.owned(optimizer)
        if ready and (self._gradients.done(grads) or not all_plain(grads)):
            start = combined(record["found_inf_per_device"].values(), scale.device)
            record["found_inf_per_device"] = self._unscale_grads_(
                optimizer, _inverse(scale), start, True
            )
            record["stage"], ready = OptState.UNSCALED, False
        elif ready and not record.get("agreed"):
            if type(self)._check_inf_per_device is Stepping._check_inf_per_device:
                self._check_inf(optimizer, grads)
            else:  # a subclass has its own
                self._check_inf_per_device(optimizer)
        found_inf = combined(record["found_inf_per_device"].values(), scale.device)
        known_good = not self._on_device(scale) and not found_inf.item()
        if not known_good and needs_host_decision(optimizer) and found_inf.item():
            record["stage"] = OptState.STEPPED
            self._remember(optimizer, False)
            return None
        own = getattr(optimizer, "grad_scale", None)
        if ready:
            own = scale.clone() if own is None else scale * own
        result = _step_with(optimizer, own, found_inf, args, kwargs)
        record["stage"] = OptState.STEPPED
        self._remember(optimizer, found_inf)
        if ready and _writes_back(optimizer):
            self._gradients.mark(optimizer, grads, found_inf)
        self._gradients.settle(optimizer)
        return result

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
            if _is_fused(optimizer) and all_plain(self._gradients.owned(optimizer)):
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
        """Whether the step was applied: a bool, a found_inf flag, or None where nobody knows."""
        self._results[id(optimizer)] = (_reference(optimizer), result)


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


def _is_fused(optimizer: Optimizer) -> bool:
    """Whether the optimizer takes `grad_scale` and `found_inf` (and not the old keyword)."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return not _takes_scaler(getattr(optimizer.step, "__func__", optimizer.step))


_TAKES_SCALER: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _takes_scaler(step: Callable[..., Any]) -> bool:
    known = _TAKES_SCALER.get(step)
    if known is None:
        known = "grad_scaler" in inspect.signature(step).parameters
        _TAKES_SCALER[step] = known
    return known


def _step_with(
    optimizer: Optimizer, grad_scale: Any, found_inf: Tensor, args: Any, kwargs: Any
) -> Any:
    """Step with the two attributes fused kernels read, and always take them away again."""
    own, done = getattr(optimizer, "grad_scale", None), False
    try:
        optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        result = optimizer.step(*args, **kwargs)
        done = True
        return result
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        if own is not None and not done:
            optimizer.grad_scale = own  # type: ignore[attr-defined]
