"""Operation families kept in float32 whatever the device.

torch's autocast lists differ: CUDA's runs softmax, norms, losses, exponentials and sums in float32,
the CPU's leaves most of them in the low format they meet. Inside a low-precision policy polyamp
takes CUDA's list everywhere. On CUDA autocast itself does. On the CPU kernels under autocast's
dispatch key do, for threads inside a `Region`; they are registered when the first one is entered,
and pass everybody else's calls on. Under torch.compile, and on other devices, a function mode does;
it knows the functions that are called, not what they call.

With float32 results among low ones, operators that refuse mixed inputs need CUDA's third list too:
those take the widest of their inputs' formats (`_PROMOTE`).

Batch and instance norm are on neither list: both devices' kernels take low activations with float32
parameters and statistics, and compute in float32.

Source: torch's documentation of automatic mixed precision, "CUDA Ops that can autocast to float32".
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from polyamp._operations import FLOAT32_OPERATIONS
from polyamp_torch._cast import map_tensors, wide

Tensor = torch.Tensor
Function = TypeVar("Function", bound=Any)

_OPERATORS = {"exp": ("__pow__", "__rpow__", "__rtruediv__", "__rdiv__")}
"""Operators beside the core's names, by family."""
_PROMOTE = (
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
    " index_add index_reduce scatter scatter_reduce masked_scatter put lerp mv addmv"
)
PROMOTE = "promote"
"""In the place of a family: operators whose inputs are brought to the widest format among them."""
_ATEN = {"logsigmoid": "log_sigmoid"}
"""Operators that torch.ops.aten calls otherwise."""
FAMILY_OF: Mapping[str, str] = {
    name: family
    for family, names in (
        *FLOAT32_OPERATIONS.items(),
        *_OPERATORS.items(),
        (PROMOTE, tuple(_PROMOTE.split())),
    )
    for name in names
}
"""The family of every function of torch, by its name, that belongs to one; or PROMOTE."""
_CALLED = {**FAMILY_OF, **{f"linalg_{name}": family for name, family in FAMILY_OF.items()}}


def _prepared(family: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of an operation of `family` in the format that it is to compute in."""
    if family != PROMOTE:
        return [wide(arg) for arg in args], {key: wide(value) for key, value in kwargs.items()}
    formats = {v.dtype for v in (*args, *kwargs.values()) if _is_floating(v)}
    if len(formats) < 2:
        return args, kwargs
    widest = functools.reduce(torch.promote_types, formats)
    inputs = map_tensors([list(args), kwargs], lambda t: t.to(widest) if _is_floating(t) else t)
    return inputs[0], inputs[1]


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class FamilyMode(TorchFunctionMode):
    """While entered and autocast is on, operations of some families compute in float32.

    Args:
        device: the device type.
        families: the families to widen, e.g. ("softmax", "norm").
    """

    def __init__(self, device: str, families: Iterable[str]) -> None:
        super().__init__()
        self.device, self.families = device, frozenset(families)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Bring the arguments to the family's format, then call."""
        kwargs = kwargs or {}
        family = _CALLED.get(getattr(func, "__name__", ""))
        known = family in self.families or (family == PROMOTE and self.families)
        if family is None or not known or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        if not torch.is_autocast_enabled(self.device):
            return func(*args, **kwargs)
        args, kwargs = _prepared(family, args, kwargs)
        with torch.autocast(self.device, enabled=False):
            return func(*args, **kwargs)


class _Active(threading.local):
    families: frozenset[str] = frozenset()
    formats: frozenset[torch.dtype] = frozenset()
    """Low formats of the regions around, autocast's cache of weights may hold all of them."""


_active = _Active()


_traceable: list[Any] = []


def _untraced(function: Function) -> Function:
    """Mark a function that Dynamo must not compile by itself after a graph break around it."""
    _traceable.append(function.__code__)
    return function


def keep_from_dynamo() -> None:
    """Tell Dynamo of the marked functions, once it is loaded; costs nothing before and after."""
    if _traceable and "torch._dynamo" in sys.modules:
        from torch._dynamo.eval_frame import skip_code

        while _traceable:
            skip_code(_traceable.pop())


class Region:
    """Autocast to a low format with some families in float32, or neither; a context manager.

    Args:
        device: the device type.
        dtype: float16 or bfloat16; None switches autocast and families off.
        families: the families to widen.
    """

    __slots__ = ("_device", "_dtype", "_entered", "_families", "_mode", "_off", "_outside")

    def __init__(self, device: str, dtype: torch.dtype | None, families: frozenset[str]) -> None:
        self._device, self._dtype, self._families = device, dtype, families
        self._entered: torch.autocast | None = None
        self._mode: FamilyMode | None = None

    @_untraced
    def __enter__(self) -> None:
        self._outside, self._off = (_active.families, _active.formats), False
        formats = _active.formats
        if _autocasts(self._device):
            formats |= {torch.get_autocast_dtype(self._device)}
        if self._dtype is None:
            self._off = _autocasts(self._device)
            if self._off:
                torch.set_autocast_enabled(self._device, False)
        elif torch.amp.is_autocast_available(self._device):
            if self._families and self._device == "cpu":
                _register()
            self._entered = _autocast(self._device, self._dtype, formats)
            self._entered.__enter__()  # type: ignore[no-untyped-call]
            if self._families and self._device not in ("cpu", "cuda"):
                self._mode = FamilyMode(self._device, self._families)
                self._mode.__enter__()  # type: ignore[no-untyped-call]
        _active.families, _active.formats = self._families, formats

    @_untraced
    def __exit__(self, *error: Any) -> None:
        _active.families, _active.formats = self._outside
        if self._off:
            torch.set_autocast_enabled(self._device, True)
        if self._mode is not None:
            self._mode.__exit__(*error)  # type: ignore[no-untyped-call]
        if self._entered is not None:
            self._entered.__exit__(*error)


@_untraced
def _autocasts(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


@_untraced
def _autocast(device: str, dtype: torch.dtype, around: frozenset[torch.dtype]) -> torch.autocast:
    """torch.autocast, whose cache of cast weights must not serve two formats: it has one key."""
    return torch.autocast(device, dtype, cache_enabled=None if around <= {dtype} else False)


class Again:
    """Families for a module whose forward may be called where autocast has been restored, and
    they have not: activation checkpointing calls it from the backward pass."""

    __slots__ = ("_families", "_outside")

    def __init__(self, families: frozenset[str]) -> None:
        self._families = families

    @_untraced
    def __enter__(self) -> None:
        self._outside = _active.families
        _active.families = self._families

    @_untraced
    def __exit__(self, *error: Any) -> None:
        _active.families = self._outside


@contextlib.contextmanager
def traced(device: str, dtype: torch.dtype | None, families: frozenset[str]) -> Iterator[None]:
    """`Region` as torch.compile can trace it."""
    with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
        if dtype is None or device == "cuda":
            yield
        else:
            with FamilyMode(device, families):
                yield


_registered: list[torch.library.Library] = []
_lock = threading.Lock()
_KEY = "AutocastCPU"


@_untraced
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
            kernel = functools.partial(_kernel, operator, family)
            library.impl(operator, kernel, _KEY, with_keyset=True)  # type: ignore[no-untyped-call]
        _registered.append(library)


@functools.cache
@_untraced
def _operators() -> dict[tuple[str, str], str]:
    """(operator, overload) -> family, of all that have no autocast kernel of torch's own."""
    found = {}
    for name, family in FAMILY_OF.items():
        for spelt in (name, f"linalg_{name}", _ATEN.get(name, name)):
            packet = getattr(torch.ops.aten, spelt, None)
            for overload in () if packet is None else packet.overloads():
                if _is_open(getattr(packet, overload)):
                    found[spelt, overload] = family
    return found


@_untraced
def _is_open(operator: Any) -> bool:
    schema = operator._schema
    name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
    return (
        bool(torch._C._dispatch_has_kernel(name))
        and not torch._C._dispatch_has_kernel_for_dispatch_key(name, _KEY)
        and not any(a.alias_info is not None or "Dimname" in str(a.type) for a in schema.arguments)
    )


@functools.cache
def _below() -> Any:
    """The dispatch keys that come after autocast's."""
    return torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.AutocastCPU)


def _kernel(operator: Any, family: str, keys: Any, *args: Any, **kwargs: Any) -> Any:
    active = _active.families
    if family in active or (family == PROMOTE and active):
        new, named = _prepared(family, args, kwargs)
        if new is not args:
            with torch.autocast("cpu", enabled=False):
                return operator(*new, **named)
    return operator.redispatch(keys & _below(), *args, **kwargs)
