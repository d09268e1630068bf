"""Operation families kept in float32 whatever the device.

torch's autocast lists differ: CUDA's runs softmax, norms, losses, exponentials and sums in float32,
the CPU's leaves most of them in the low format they meet. Inside a low-precision policy polyamp
takes CUDA's list everywhere. On CUDA autocast itself does. On the CPU kernels under autocast's
dispatch key do, for threads inside a `Region`; they are registered when the first one is entered,
and pass everybody else's calls on. Under torch.compile, and on other devices, a function mode does.

Batch and instance norm are on neither list: both devices' kernels take low activations with float32
parameters and statistics, and compute in float32.

Source: torch's documentation of automatic mixed precision, "CUDA Ops that can autocast to float32".
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
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
_ATEN = {"logsigmoid": "log_sigmoid"}
"""Operators that torch.ops.aten calls otherwise."""
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


class FamilyMode(TorchFunctionMode):
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
    families: frozenset[str] = frozenset()


_active = _Active()


class Region:
    """Autocast to a low format with some families in float32, or neither; a context manager.

    Args:
        device: the device type.
        dtype: float16 or bfloat16; None switches autocast and families off.
        families: the families to widen.
    """

    __slots__ = ("_device", "_dtype", "_entered", "_families", "_off", "_outside")

    def __init__(self, device: str, dtype: torch.dtype | None, families: frozenset[str]) -> None:
        self._device, self._dtype, self._families = device, dtype, families
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        self._outside, _active.families = _active.families, self._families
        self._off = self._dtype is None and torch.is_autocast_enabled(self._device)
        if self._off:
            torch.set_autocast_enabled(self._device, False)
        elif self._dtype is not None:
            self._entered = [torch.autocast(self._device, self._dtype)]
            if self._families and self._device == "cpu":
                _register()
            elif self._families and self._device != "cuda":
                self._entered.append(FamilyMode(self._families))
            for context in self._entered:
                context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self._entered):
            context.__exit__(*error)
        if self._off:
            torch.set_autocast_enabled(self._device, True)
        _active.families = self._outside


class Again:
    """Families for a module whose forward may be called where autocast has been restored, and
    they have not: activation checkpointing calls it from the backward pass."""

    __slots__ = ("_families", "_outside")

    def __init__(self, families: frozenset[str]) -> None:
        self._families = families

    def __enter__(self) -> None:
        self._outside = _active.families
        _active.families = self._families

    def __exit__(self, *error: Any) -> None:
        _active.families = self._outside


@contextmanager
def traced(device: str, dtype: torch.dtype | None, families: frozenset[str]) -> Iterator[None]:
    """`Region` as torch.compile can trace it."""
    with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
        if dtype is None or device == "cuda":
            yield
        else:
            with FamilyMode(families):
                yield


_registered: list[torch.library.Library] = []
_lock = threading.Lock()
_KEY = "AutocastCPU"


def _register() -> None:
    """Put `_kernel` under the CPU's autocast key for every operator that torch leaves low there."""
    if _registered:
        return
    with _lock:
        if _registered:
            return
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for name, family in _operators().items():
            operator = getattr(getattr(torch.ops.aten, name[0]), name[1])
            kernel = partial(_kernel, operator, family)
            library.impl(operator, kernel, _KEY, with_keyset=True)  # type: ignore[no-untyped-call]
        _registered.append(library)


@cache
def _operators() -> dict[tuple[str, str], str]:
    """(operator, overload) -> family, of all that have no autocast kernel of torch's own."""
    found = {}
    for family, names in _NAMES.items():
        for name in names.split():
            for spelt in (name, f"linalg_{name}", _ATEN.get(name, name)):
                packet = getattr(torch.ops.aten, spelt, None)
                for overload in () if packet is None else packet.overloads():
                    if _is_open(getattr(packet, overload)):
                        found[spelt, overload] = family
    return found


def _is_open(operator: Any) -> bool:
    schema = operator._schema
    name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
    return (
        bool(torch._C._dispatch_has_kernel(name))
        and not torch._C._dispatch_has_kernel_for_dispatch_key(name, _KEY)
        and not any(a.alias_info is not None or "Dimname" in str(a.type) for a in schema.arguments)
    )


_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.AutocastCPU)


def _kernel(operator: Any, family: str, keys: Any, *args: Any, **kwargs: Any) -> Any:
    if family not in _active.families:
        return operator.redispatch(keys & _BELOW, *args, **kwargs)
    with torch.autocast("cpu", enabled=False):
        wide = {key: _wide(value) for key, value in kwargs.items()}
        return operator(*[_wide(value) for value in args], **wide)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _LOW else value
