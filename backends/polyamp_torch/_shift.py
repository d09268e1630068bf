"""A power of two of a module's own: gradients inside it are 2**bits as large as outside.

    inputs   cast to the compute dtype; backward: gradient cast back, times 2**-bits
    outputs  cast to the output dtype; backward: gradient times 2**bits, cast to the compute dtype
    parameters' gradients: times 2**-bits, by a hook, before they are accumulated

Gradients of gradients are refused by autograd there: parameters' hooks could not tell them apart.

So each product is taken in the wider of the two formats, and what leaves the module is as without.
At a module inside one with a power of its own the difference of the two is applied.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from polyamp._errors import PolicyError
from polyamp_torch._cast import map_tensors

Tensor = torch.Tensor


class _Cast(torch.autograd.Function):
    """A cast, never a view, whose gradient is multiplied by 2**bits in float32."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype, bits: int) -> Tensor:
        ctx.dtype, ctx.bits = tensor.dtype, bits
        return tensor.to(dtype, copy=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return times(grads[0], ctx.bits).to(ctx.dtype), None, None


def times(grad: Tensor, bits: int) -> Tensor:
    """grad * 2**bits, in float32 or wider."""
    wide = grad if grad.dtype == torch.float64 else grad.float()
    half = bits // 2  # 2**bits alone may be no normal number
    return wide * 2.0**half * 2.0 ** (bits - half)


def cast_shifted(tree: Any, dtype: torch.dtype, bits: int) -> Any:
    """The tree with floating tensors cast, and their gradients multiplied by 2**bits."""

    def one(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return _Cast.apply(tensor, dtype, bits)  # type: ignore[no-untyped-call,no-any-return]

    return map_tensors(tree, one)


def _unshift(bits: int, grad: Tensor) -> Tensor:
    return times(grad, -bits).to(grad.dtype)


class Unshifted:
    """Hooks on the parameters of modules that take 2**bits out of their gradients.

    Parameters lose hooks when they are copied or pickled; copies of this object put them back.

    Args:
        modules: of one region.
        bits: its power of two.
        others: of the regions before; a parameter that they see to, tied, has one hook only, since
            its gradient is a sum of equally large parts.
    """

    def __init__(
        self, modules: Iterable[torch.nn.Module], bits: int, others: Iterable[Unshifted] = ()
    ) -> None:
        self.modules, self.bits, self.others = list(modules), bits, list(others)
        self.params = self._now()
        self._hook()

    def _now(self) -> list[torch.nn.Parameter]:
        owned = (param for module in self.modules for param in module.parameters(recurse=False))
        seen = {id(param) for other in self.others for param in other.params}
        return [p for p in dict.fromkeys(owned) if p.requires_grad and id(p) not in seen]

    def _hook(self) -> None:
        hook = functools.partial(_unshift, self.bits)
        self._handles = [param.register_hook(hook) for param in self.params]  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def check(self, tracing: bool) -> None:
        """See that the parameters are those that have the hooks; renew them where they are not.

        Raises:
            PolicyError: the parameters were replaced, and torch.compile traces this call.
        """
        now = self._now()
        if len(now) == len(self.params) and all(map(operator.is_, now, self.params)):
            return
        if tracing:
            raise PolicyError(
                "parameters of a module with a power of two of its own were replaced or unfrozen;"
                " call apply_policy again before the model is compiled"
            )
        self.remove()
        self.params = now
        self._hook()

    def __getstate__(self) -> dict[str, Any]:
        names = ("modules", "params", "bits", "others")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._hook()
