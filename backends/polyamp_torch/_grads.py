"""The gradients of one iteration: collect, unscale once, judge; and scaling of outputs."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from polyamp_torch._cast import like_mapping
from polyamp_torch._inspect import amaxes, dense, judge

Tensor = torch.Tensor
PerDevice = dict[torch.device, Tensor]

_HALF = (torch.float16, torch.complex32)
_KNOWN = (
    *_HALF,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


class Gradients:
    """Which gradients of this iteration are unscaled already.

    A parameter may belong to two optimizers; its gradient is unscaled by whichever comes first.
    Gradients are known by identity, from one `clear` to the next. Between an optimizer's unscaling
    and its step they may be changed in place (clipping); changed after the step, they hold what a
    new backward pass wrote, which is scaled again.
    """

    def __init__(self) -> None:
        self._done: dict[int, tuple[weakref.ref[Tensor], Tensor | None, int | None]] = {}

    def clear(self) -> None:
        """Forget: the next backward pass writes scaled gradients."""
        self._done.clear()

    def mark(self, grads: Iterable[Tensor], found_inf: Tensor | None = None) -> None:
        """Note that `grads` are unscaled; with the 0-d flag `found_inf`, that they are unless set.

        No reference to them is kept.
        """
        for grad in grads:
            self._done[id(grad)] = (weakref.ref(grad), found_inf, None)

    def settle(self, grads: Iterable[Tensor]) -> None:
        """Note that the optimizer has stepped: from now on a change makes `grads` scaled again."""
        for grad in grads:
            known, found_inf, _ = self._done.get(id(grad), (None, None, None))
            if known is not None and known is weakref.ref(grad):
                self._done[id(grad)] = (known, found_inf, _version(grad))

    def is_done(self, grad: Tensor) -> bool:
        """Whether `grad` is unscaled. Waits for the device only after a fused step shared it."""
        known, found_inf, version = self._done.get(id(grad), (None, None, None))
        if known is not weakref.ref(grad) or version not in (None, _version(grad)):
            return False
        return found_inf is None or not found_inf.item()

    def any_done(self, grads: Iterable[Tensor]) -> bool:
        """Whether another optimizer has unscaled one of `grads`."""
        return bool(self._done) and any(self.is_done(grad) for grad in grads)

    @torch.no_grad()
    def unscale_(
        self, optimizer: Optimizer, inverse: Tensor, found_inf: Tensor, fp16: bool, twice: bool
    ) -> PerDevice:
        """Multiply the optimizer's gradients by `inverse` in place and look for what is not finite.

        Args:
            optimizer: owner of the parameters. Nothing is changed if one gradient is refused.
            inverse: f32, 0-d: 1 / scale.
            found_inf: f32, 0-d: value the flags start from.
            fp16: allow float16 gradients (their unscaled values may be below float16's range).
            twice: judge the unscaled values too, which a scale below 1 can push to infinity.

        Returns:
            One 0-d f32 flag per device, above 0 where a gradient is not finite.

        Raises:
            ValueError: a float16 gradient where `fp16` is false.
        """
        grads = owned_grads(optimizer, fp16)
        todo: dict[torch.device, dict[tuple[torch.dtype, bool], list[Tensor]]]
        todo = defaultdict(lambda: defaultdict(list))
        for grad in grads:
            done = bool(self._done) and self.is_done(grad)
            todo[grad.device][grad.dtype, done].append(grad)
        flags: PerDevice = {}
        for device, groups in todo.items():
            flag = flags[device] = found_inf.to(device, copy=True, non_blocking=True)
            by = inverse.to(device, non_blocking=True)
            one = torch.ones_like(by)
            for (_, done), group in groups.items():
                values = [dense(grad) for grad in group]
                torch._amp_foreach_non_finite_check_and_unscale_(values, flag, one if done else by)
                if twice and not done:
                    torch._amp_foreach_non_finite_check_and_unscale_(values, flag, one)
                self.mark(group)
        return flags

    @torch.no_grad()
    def check(self, optimizer: Optimizer, inverse: Tensor) -> PerDevice:
        """Look for what is not finite, as it came or once unscaled, and change no gradient.

        Args, returns: as `unscale_`.
        """
        grads = owned_grads(optimizer, fp16=True)
        flags: PerDevice = {}
        for done in (False, True):
            values = [dense(g) for g in grads if self.is_done(g) == done]
            by = torch.ones_like(inverse) if done else inverse
            for value in values:
                if value.device not in flags:
                    flags[value.device] = torch.zeros((), dtype=torch.float32, device=value.device)
            for device, top in amaxes([v for v in values if v.numel()]).items():
                bad = judge(top, by).logical_not().to(torch.float32)
                flags[device] = torch.maximum(flags[device], bad)
        return flags


def _version(grad: Tensor) -> int:
    """The count of in-place changes, which inference tensors do not keep."""
    return 0 if grad.is_inference() else grad._version


def owned_grads(optimizer: Optimizer, fp16: bool) -> list[Tensor]:
    """The optimizer's gradients, None left out.

    Sparse float16 ones are coalesced first, lazily conjugated ones resolved.

    Raises:
        AssertionError: a parameter is not a tensor (as torch).
        ValueError: a float16 gradient where `fp16` is false, or one of another dtype (float8).
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for param in params:
        if not isinstance(param, Tensor):
            raise AssertionError(f"a parameter must be a torch.Tensor, got {type(param).__name__}")
        if param.grad is not None and param.grad.dtype not in _KNOWN:
            raise ValueError(f"gradients of dtype {param.grad.dtype} cannot be unscaled")
        if not fp16 and param.grad is not None and param.grad.dtype in _HALF:
            raise ValueError(
                "float16 gradients cannot be unscaled in place: the result may be below float16's"
                " range. Keep float32 parameters and run the forward pass under autocast"
            )
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        if grad.is_sparse and grad.dtype == torch.float16:
            param.grad = grad.coalesce()
        elif grad.is_conj() or grad.is_neg():
            param.grad = grad.resolve_conj().resolve_neg()
    return [p.grad for p in params if p.grad is not None]


def all_plain(grads: Iterable[Tensor]) -> bool:
    """Whether no gradient is a tensor subclass, such as DTensor, with kernels of its own."""
    return all(type(grad) is Tensor for grad in grads)


def needs_host_decision(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer would keep uninitialised momentum buffers from a skipped step.

    torch's fused SGD makes its momentum buffers on the first step and, where that step is skipped
    on the device, leaves them unset but registered. Until it has them the skip is decided here.
    """
    return isinstance(optimizer, torch.optim.SGD) and any(
        group.get("momentum", 0) != 0
        and any(
            p.grad is not None and optimizer.state.get(p, {}).get("momentum_buffer") is None
            for p in group["params"]
        )
        for group in optimizer.param_groups
    )


def scaled(value: Any, scale_on: Callable[[torch.device], Tensor]) -> Any:
    """`value` times the scale: a tensor, or lists, tuples, dicts and iterables of them.

    Args:
        value: floating tensors. A float16 tensor with dimensions is widened to float32 first,
            since float16 ends at 65504. An iterable that is no collection is scaled lazily.
        scale_on: gives the scale, f32, 0-d, on a device.

    Raises:
        ValueError: something in `value` is neither a tensor nor a collection of them.
    """
    if isinstance(value, Tensor):
        wide = value.float() if value.dtype == torch.float16 and value.dim() else value
        return wide * scale_on(value.device)
    if isinstance(value, Mapping):
        return like_mapping(value, {key: scaled(item, scale_on) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(scaled(item, scale_on) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(scaled(item, scale_on) for item in value)
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return (scaled(item, scale_on) for item in value)
    raise ValueError(
        "scale() takes a tensor, or lists, tuples, dicts and other iterables of tensors, nested or"
        f" not; got {type(value).__name__} among them"
    )


def combined(flags: Iterable[Tensor], home: torch.device) -> Tensor:
    """The largest of some 0-d flags, on `home`; 0 if there are none."""
    # A copy to the CPU that does not wait could be read before it has arrived.
    moved = [flag.to(home, non_blocking=home.type != "cpu") for flag in flags]
    if not moved:
        return torch.zeros((), dtype=torch.float32, device=home)
    return moved[0] if len(moved) == 1 else torch.stack(moved).amax()
