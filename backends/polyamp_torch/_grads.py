"""The gradients of one iteration: collect, unscale once, judge."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from polyamp_torch._inspect import Range, amaxes, dense, judge

Tensor = torch.Tensor
PerDevice = dict[torch.device, Tensor]

_PLAIN = {Tensor}
_HALF = (torch.float16, torch.complex32)
_KNOWN = {
    *_HALF,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
}
_REFUSED = (
    "gradients of dtype {} cannot be unscaled in place: small ones would fall below its range. Keep"
    " float32 parameters and run the forward pass under autocast, or wrap the optimizer in"
    " MasterWeights"
)


@dataclass
class Mark:
    """One optimizer's gradients, unscaled."""

    grads: list[Tensor] | None
    """They themselves, until another optimizer is marked; then None, and `refs` tells them."""
    found_inf: Tensor | None
    """A 0-d flag: they are unscaled unless it is set. None: they are."""
    versions: list[int] | None = None
    """Their counts of in-place changes after the optimizer's step, where it has stepped."""
    refs: list[weakref.ref[Tensor]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def release(self) -> None:
        """Keep no reference to the gradients any longer."""
        if self.grads is not None:
            self.ids, self.refs = list(map(id, self.grads)), list(map(weakref.ref, self.grads))
            self.grads = None

    def entries(self) -> Iterable[tuple[int, tuple[Mark, int]]]:
        """The id of each gradient, with this mark and its place in it."""
        ids = self.ids if self.grads is None else map(id, self.grads)
        return ((key, (self, i)) for i, key in enumerate(ids))

    def holds(self, grad: Tensor, i: int) -> bool:
        """Whether entry `i` is about `grad` and still true; may wait for `found_inf`."""
        same = (self.refs[i] is weakref.ref(grad)) if self.grads is None else self.grads[i] is grad
        if not same or (self.versions is not None and [self.versions[i]] != _versions([grad])):
            return False
        return self.found_inf is None or not self.found_inf.item()


class Gradients:
    """Which gradients of this iteration are unscaled already.

    A parameter may belong to two optimizers; its gradient is unscaled by whichever comes first.
    Gradients are known by identity, from one `clear` to the next. Between an optimizer's unscaling
    and its step they may be changed in place (clipping); changed after the step, they hold what a
    new backward pass wrote, which is scaled again.
    """

    def __init__(self) -> None:
        self._owned: dict[int, list[Tensor]] = {}
        self._marks: dict[int, Mark] = {}

    def clear(self) -> None:
        """Forget: the next backward pass writes scaled gradients."""
        self._owned.clear()
        self._marks.clear()

    def owned(self, optimizer: Optimizer, fp16: bool = True) -> list[Tensor]:
        """`owned_grads`, remembered until `settle` or `clear`."""
        grads = self._owned[id(optimizer)] = owned_grads(optimizer, fp16)
        return grads

    def coalesce(self, optimizer: Optimizer) -> None:
        """Sum up the duplicate entries of the optimizer's sparse gradients."""
        grads = self.owned(optimizer)
        done = self.done(grads)
        unscaled = []
        for group in optimizer.param_groups:
            for param in group["params"]:
                grad = param.grad
                if grad is not None and grad.is_sparse and not grad.is_coalesced():
                    param.grad = grad.coalesce()
                if grad is not None and id(grad) in done:
                    unscaled.append(param.grad)
        if unscaled:
            self.mark(optimizer, unscaled)

    def mark(
        self, optimizer: Optimizer, grads: Sequence[Tensor], found_inf: Tensor | None = None
    ) -> None:
        """Note that `grads` of an optimizer are unscaled (see `Mark`)."""
        self._marks.pop(id(optimizer), None)  # the newest mark comes last
        for mark in self._marks.values():
            mark.release()
        self._marks[id(optimizer)] = Mark(list(grads), found_inf)

    def settle(self, optimizer: Any) -> None:
        """Note that the optimizer has stepped: what changes after this is scaled again."""
        grads, mark = self._owned.pop(id(optimizer), None), self._marks.get(id(optimizer))
        if mark is not None and mark.grads is not None:
            mark.versions = _versions(mark.grads)
        elif mark is not None and grads is not None and len(grads) == len(mark.ids):
            mark.versions = _versions(grads)

    def done(self, grads: Iterable[Tensor]) -> set[int]:
        """The ids of those that are unscaled. Waits for the device only after a fused step."""
        known: dict[int, tuple[Mark, int]] = {}
        for mark in self._marks.values():
            known.update(mark.entries())
        found = ((grad, known.get(id(grad))) for grad in grads) if known else ()
        return {id(grad) for grad, entry in found if entry and entry[0].holds(grad, entry[1])}

    @torch.no_grad()
    def unscale_(
        self,
        optimizer: Optimizer,
        inverse: Tensor,
        found_inf: Tensor,
        fp16: bool,
        twice: bool,
        seen: Range | None = None,
    ) -> PerDevice:
        """Multiply the optimizer's gradients by `inverse` in place and look for what is not finite.

        Args:
            optimizer: owner of the parameters. Nothing is changed if one gradient is refused.
            inverse: f32, 0-d: 1 / scale.
            found_inf: f32, 0-d: value the flags start from.
            fp16: allow float16 gradients (their unscaled values may be below float16's range).
            twice: judge the unscaled values too, which a scale below 1 can push to infinity.
            seen: is told of the gradients that still carry the scale.

        Returns:
            One 0-d f32 flag per device, above 0 where a gradient is not finite.

        Raises:
            RuleError: `seen` and a DTensor.
            ValueError: a float16 gradient where `fp16` is false.
        """
        grads = self.owned(optimizer, fp16)
        done, flags = self.done(grads), PerDevice()
        fresh = [grad for grad in grads if id(grad) not in done] if done else grads
        unscaled = [grad for grad in grads if id(grad) in done] if done else []
        if seen is not None:
            known = None if done else seen.note_and_unscale(fresh, inverse, found_inf)
            if known is not None:
                self.mark(optimizer, grads)
                tell(optimizer, "_gradients_unscaled")
                return known
            seen.note(fresh)
        try:
            _check_and_multiply(fresh, inverse, found_inf, flags, unscaled)
        finally:
            self.mark(optimizer, grads if len(unscaled) == len(grads) else unscaled)
            tell(optimizer, "_gradients_unscaled")
        if twice or done:
            again = grads if twice else [grad for grad in grads if id(grad) in done]
            _check_and_multiply(again, torch.ones_like(inverse), found_inf, flags, [])
        return flags

    @torch.no_grad()
    def check(
        self,
        grads: Sequence[Tensor],
        inverse: Tensor,
        amplifies: bool,
        seen: Range | None = None,
    ) -> PerDevice:
        """Look for what is not finite, as it came or once unscaled, and change no value.

        Args:
            grads: as `owned_grads` gives them.
            inverse: f32, 0-d: 1 / scale.
            amplifies: whether `inverse` may be above 1. If not, what is finite as it came stays so
                when unscaled, and torch's own check will do.
            seen: as in `unscale_`; one pass then measures and judges.

        Returns:
            As `unscale_`.
        """
        flags: PerDevice = {}
        if not amplifies and seen is None:
            one = torch.ones_like(inverse)
            _check_and_multiply(grads, one, torch.zeros_like(inverse), flags, [])
            return flags
        done = self.done(grads)
        for unscaled in (False, True):
            values = [g for g in grads if (id(g) in done) == unscaled]
            by = torch.ones_like(inverse) if unscaled else inverse
            for device in {value.device for value in values}.difference(flags):
                flags[device] = torch.zeros((), dtype=torch.float32, device=device)
            if seen is None or unscaled:
                found = amaxes([v for v in map(dense, values) if v.numel()])
            else:
                found = seen.note(values)
            for device, top in found.items():
                bad = judge(top, by).logical_not().to(torch.float32)
                flags[device] = torch.maximum(flags[device], bad)
        return flags


def _check_and_multiply(
    grads: Iterable[Tensor],
    by: Tensor,
    found_inf: Tensor,
    flags: PerDevice,
    multiplied: list[Tensor],
) -> None:
    """torch's check and multiplication in place, one call for each device and dtype.

    A device's flag in `flags` starts as `found_inf`. What is multiplied joins `multiplied`, also
    where a later call fails.
    """
    groups: dict[tuple[torch.device, torch.dtype, torch.layout], list[Tensor]] = {}
    for grad in grads:
        key = (grad.device, grad.dtype, grad.layout)
        if key in groups:
            groups[key].append(grad)
        else:
            groups[key] = [grad]
    for (device, dtype, layout), group in groups.items():
        if device not in flags:
            flags[device] = found_inf.to(device, copy=True, non_blocking=True)
        plain = layout is torch.strided and not dtype.is_complex
        torch._amp_foreach_non_finite_check_and_unscale_(
            group if plain else [dense(grad) for grad in group],
            flags[device],
            by.to(device, non_blocking=True),
        )
        multiplied += group


def _versions(grads: Iterable[Tensor]) -> list[int]:
    """Counts of in-place changes; 0 for inference tensors, which keep none."""
    try:
        return [grad._version for grad in grads]
    except RuntimeError:
        return [0 if grad.is_inference() else grad._version for grad in grads]


def owned_grads(optimizer: Optimizer, fp16: bool) -> list[Tensor]:
    """The optimizer's gradients, None left out.

    Sparse float16 ones are coalesced first, lazily conjugated ones resolved.

    Raises:
        AssertionError: a parameter is not a tensor (as torch).
        ValueError: a float16 gradient where `fp16` is false, or one of another dtype (float8).
    """
    grads: list[Tensor] = []
    odd: list[tuple[int, Tensor]] = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not isinstance(param, Tensor):
                raise AssertionError(f"a parameter must be a Tensor, got {type(param).__name__}")
            grad = param.grad
            if grad is None:
                continue
            dtype = grad.dtype
            if dtype not in _KNOWN or (not fp16 and dtype in _HALF):
                raise ValueError(_REFUSED.format(dtype))
            if grad.is_neg() or grad.is_sparse or (dtype.is_complex and grad.is_conj()):
                odd.append((len(grads), param))
            grads.append(grad)
    for i, param in odd:
        grads[i] = param.grad = _resolved(grads[i])
    return grads


def _resolved(grad: Tensor) -> Tensor:
    if grad.is_sparse:
        return grad.coalesce() if grad.dtype in _HALF else grad
    return grad.resolve_conj().resolve_neg()


def all_plain(grads: Iterable[Tensor]) -> bool:
    """Whether no gradient is a tensor subclass, such as DTensor, with kernels of its own."""
    return _PLAIN.issuperset(map(type, grads))


def needs_host_decision(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer would keep uninitialised momentum buffers from a skipped step.

    torch's fused SGD makes its momentum buffers on the first step and, where that step is skipped
    on the device, leaves them unset but registered. Until it has them the skip is decided here.
    """
    inner = getattr(optimizer, "inner", optimizer)  # of MasterWeights
    return isinstance(inner, torch.optim.SGD) and any(
        group.get("momentum", 0) != 0
        and any(
            p.grad is not None and optimizer.state.get(p, {}).get("momentum_buffer") is None
            for p in group["params"]
        )
        for group in optimizer.param_groups
    )


def combined(flags: Iterable[Tensor], home: torch.device) -> Tensor:
    """The largest of some 0-d flags, on `home`; 0 if there are none."""
    # A copy to the CPU that does not wait could be read before it has arrived.
    moved = [flag.to(home, non_blocking=home.type != "cpu") for flag in flags]
    if not moved:
        return torch.zeros((), dtype=torch.float32, device=home)
    return moved[0] if len(moved) == 1 else torch.stack(moved).amax()


def is_fused(optimizer: Optimizer) -> bool:
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


def step_with(
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


def tell(optimizer: Any, what: str) -> None:
    """Let an optimizer that has gradients of its own (MasterWeights) know where the scaler is.

    Args:
        optimizer: any; most have no such method.
        what: "_gradients_unscaled", by the scaler; or "_iteration_over": stepped, or skipped.
    """
    known = getattr(optimizer, what, None)
    if known is not None:
        known()
