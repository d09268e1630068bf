"""Operation families kept in float32 whatever the device.

torch's autocast lists differ: CUDA's runs softmax, norms, losses, exponentials and sums in float32,
the CPU's leaves most of them in the low format they meet. Inside a low-precision policy polyamp
takes CUDA's list everywhere. On CUDA autocast itself does; elsewhere `Families` widens the inputs.

Batch and instance norm are on neither list: both devices' kernels take low activations with float32
parameters and statistics, and compute in float32.

Source: torch's documentation of automatic mixed precision, "CUDA Ops that can autocast to float32".
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

Tensor = torch.Tensor

_NAMES: dict[str, str] = {
    "softmax": "softmax log_softmax softmin gumbel_softmax",
    "norm": (
        "layer_norm group_norm rms_norm local_response_norm normalize norm vector_norm matrix_norm"
        " cosine_similarity renorm dist pdist cdist"
    ),
    "loss": (
        "cross_entropy nll_loss binary_cross_entropy binary_cross_entropy_with_logits mse_loss"
        " l1_loss smooth_l1_loss huber_loss kl_div poisson_nll_loss gaussian_nll_loss"
        " cosine_embedding_loss hinge_embedding_loss margin_ranking_loss multilabel_margin_loss"
        " multilabel_soft_margin_loss multi_margin_loss soft_margin_loss triplet_margin_loss"
        " triplet_margin_with_distance_loss ctc_loss"
    ),
    "exp": (
        "exp expm1 log log10 log2 log1p logsumexp pow __pow__ __rpow__ reciprocal __rtruediv__"
        " __rdiv__ rsqrt softplus logsigmoid acos asin cosh sinh tan erfinv"
    ),
    "sum": "sum prod cumsum cumprod logcumsumexp",
}
_HOMES = (torch, F, torch.special, torch.linalg, Tensor)
_LOW = (torch.float16, torch.bfloat16)


def _functions() -> dict[Any, str]:
    return {
        function: family
        for family, names in _NAMES.items()
        for name in names.split()
        for home in _HOMES
        if callable(function := getattr(home, name, None))
    }


FAMILY_OF: Mapping[Any, str] = _functions()
"""The family of every torch function that belongs to one."""


class Families(TorchFunctionMode):
    """While entered, functions of some families get their low-precision inputs in float32.

    Args:
        families: the families to widen, e.g. ("softmax", "norm").
    """

    def __init__(self, families: Iterable[str]) -> None:
        super().__init__()
        self.families = frozenset(families)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Widen, then call."""
        kwargs = kwargs or {}
        family = FAMILY_OF.get(func)
        if family is None or family not in self.families or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        wide = {key: _wide(value) for key, value in kwargs.items()}
        return func(*[_wide(value) for value in args], **wide)


class _Active(threading.local):
    families: tuple[str, ...] = ()


_active = _Active()


class _Outermost(Families):
    """`Families` that lets the modules inside know, so that they need not enter it again."""

    def __init__(self, families: tuple[str, ...]) -> None:
        super().__init__(families)
        self.inside, self.outside = families, _active.families

    def __enter__(self) -> Any:
        _active.families = self.inside
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        _active.families = self.outside
        super().__exit__(*error)  # type: ignore[no-untyped-call]


def entered(families: tuple[str, ...]) -> bool:
    """Whether this thread runs inside `widened(families)`; never while torch.compile traces."""
    return not torch.compiler.is_compiling() and families == _active.families


def widened(families: tuple[str, ...]) -> AbstractContextManager[Any]:
    """`Families`, or nothing where this thread has entered them already."""
    if torch.compiler.is_compiling():
        return Families(families)
    return nullcontext() if entered(families) else _Outermost(families)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _LOW else value
