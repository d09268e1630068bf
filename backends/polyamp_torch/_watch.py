"""Statistics of a model's modules, in the steps that are asked for.

    begin()    from here on
      forward of each unit: inputs and outputs are measured, a tap is put on the outputs
      backward: the taps measure the gradients of the outputs, hooks those of the parameters
    end()      all numbers to the host, in one transfer (reduced over ranks before)

A unit is a module that has parameters of its own. Forwards are wrapped as policies wrap them, so
that torch.compile traces the watched and the unwatched one, each once.
"""

from __future__ import annotations

import functools
import inspect
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from polyamp._errors import PolyampError
from polyamp._statistics import RAW, ModuleStatistics, Statistics, merged
from polyamp_torch._cast import map_tensors
from polyamp_torch._dtypes import _BATCH_NORM, _NORMS
from polyamp_torch._measure import Sample, numbers, raw, sampled, take_all, together
from polyamp_torch._modules import rules_of
from polyamp_torch._wrappers import unwrapped

Module = torch.nn.Module
Tensor = torch.Tensor
Row = tuple[float, ...]
ZEROS = (0.0,) * len(RAW)

KINDS = ("inputs", "output", "gradient", "weight_gradient", "weights")
"""Fields of `ModuleStatistics` that are measured tensors, in the order of the transfer."""
ENDS_ONLY = ("inputs", "weights")
_WATCHED = 1024
"""Entries of each unit's weights that are compared before and after a step."""


_SINKS = 4
"""Calls of a module that are told apart under torch.compile in the first sample, where gradients of
further ones add up; afterwards as many as there were."""


class _Tap(torch.autograd.Function):
    """Outputs as they are, whose gradients are measured into the gradient of `sink`."""

    @staticmethod
    def forward(ctx: Any, sink: Tensor, *outputs: Tensor) -> Any:
        return tuple(out.clone() for out in outputs)  # views refuse to be changed in place

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return together([raw(grad) for grad in grads]), *grads


@dataclass(eq=False)
class Probe:
    """What is noted of one unit."""

    path: str
    active: bool = False
    stale: bool = False
    """In a copy of a watched model."""
    forward: Any = None
    """The instance's own forward, if it had one."""
    work: float = 0.0
    noted: dict[str, list[Sample]] = field(default_factory=dict)
    sinks: list[Tensor] = field(default_factory=list)
    used: int = 0
    calls: int = _SINKS
    """The most there were in a sample."""

    def note(self, kind: str, tree: Any) -> None:
        """Keep samples of what `tree` holds; of inputs and weights their largest entries alone."""
        self.noted[kind] += take_all(tree, shares=kind not in ENDS_ONLY)

    def clear(self) -> None:
        """Forget what was noted."""
        self.noted = {kind: [] for kind in KINDS}
        self.calls, self.used = max(self.calls, self.used), 0

    def __getstate__(self) -> dict[str, Any]:
        """A copy belongs to no watch: it never measures."""
        own = {"active": False, "noted": {}, "sinks": [], "used": 0, "stale": True}
        return {**self.__dict__, **own}


def observed(module: Module, probe: Probe, /, *args: Any, **kwargs: Any) -> Any:
    """The forward of a unit."""
    own = probe.forward
    if not probe.active:
        return own(*args, **kwargs) if own else type(module).forward(module, *args, **kwargs)
    forward = own or functools.partial(type(module).forward, module)
    probe.note("inputs", (args, kwargs))
    out = forward(*args, **kwargs)
    probe.note("output", out)
    probe.work = _work(module)
    if not torch.is_grad_enabled():
        return out
    return _tapped(out, probe) if torch.compiler.is_compiling() else _hooked(out, probe)


def _hooked(out: Any, probe: Probe) -> Any:
    def hook(grad: Tensor) -> None:
        if probe.active:
            probe.note("gradient", grad)

    def one(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return tensor

    map_tensors(out, one)
    return out


def _tapped(out: Any, probe: Probe) -> Any:
    """As `_hooked`, for torch.compile, which takes no hooks on what it computes itself."""
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        if tensor.requires_grad and tensor.is_floating_point():
            tensors.append(tensor)
        return tensor

    map_tensors(out, collect)
    if not tensors:
        return out
    sink = probe.sinks[min(probe.used, len(probe.sinks) - 1)]
    probe.used += 1
    tapped = _Tap.apply(sink, *tensors)  # type: ignore[no-untyped-call]
    found = dict(zip(map(id, tensors), tapped, strict=True))
    return map_tensors(out, lambda tensor: found.get(id(tensor), tensor))


def _work(module: Module) -> float:
    """Multiply-adds an entry that is written: entries of the weights that one output takes."""
    if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
        return 0.0
    weights = [p for p in module.parameters(recurse=False) if p.dim() > 1]
    if isinstance(module, torch.nn.RNNBase):  # per layer and direction; gates for each output
        return sum(w.numel() for w in weights) / float(module.hidden_size)
    if isinstance(module, torch.nn.MultiheadAttention):  # three projections of every entry
        return sum(w.numel() for w in weights) / float(module.embed_dim)
    outputs = 1 if isinstance(module, torch.nn.modules.conv._ConvTransposeNd) else 0
    return float(sum(w.numel() // max(w.shape[outputs], 1) for w in weights))


def family_of(module: Module) -> str | None:
    """The family of operations that a module is: "norm", or None.

    Only torch's own norms are, without BatchNorm: its inputs and outputs have the policy's format.
    """
    return "norm" if isinstance(module, _NORMS) and not isinstance(module, _BATCH_NORM) else None


class Watch:
    """Measures the units of a model; `remove` gives the model its forwards back.

    Args:
        model: any module; wrappers are looked through. Policies are applied before.

    Raises:
        PolyampError: the model has no parameters, or is watched already.
    """

    def __init__(self, model: Module) -> None:
        if not isinstance(model, Module):
            raise PolyampError(f"what is watched is a torch.nn.Module, got {type(model).__name__}")
        self.root = unwrapped(model)
        self.units = {
            path: module
            for path, module in self.root.named_modules()
            if next(module.parameters(recurse=False), None) is not None
        }
        if not self.units:
            raise PolyampError("the model has no parameters, so there is nothing to measure")
        self.probes = {path: Probe(path) for path in self.units}
        self._handles: list[Any] = []
        self._before: dict[str, list[Tensor]] = {}
        self.install()

    @property
    def families(self) -> dict[str, str | None]:
        """The family of each unit, by path."""
        return {path: family_of(module) for path, module in self.units.items()}

    def install(self) -> None:
        """Wrap the forwards."""
        if any(_is_watched(module) for module in self.units.values()):
            raise PolyampError("the model is watched already; remove the other watch first")
        for path, module in self.units.items():
            probe = self.probes[path]
            probe.forward = _own_forward(module)
            forward = functools.partial(observed, module, probe)
            forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
            module.__dict__["forward"] = forward

    def remove(self) -> None:
        """Give every unit the forward back that it had."""
        self.stop()
        for path, module in self.units.items():
            if _is_watched(module):
                del module.__dict__["forward"]
                if self.probes[path].forward is not None:
                    module.__dict__["forward"] = self.probes[path].forward

    def begin(self) -> None:
        """Measure from here on."""
        self.stop()
        for path, module in self.units.items():
            probe = self.probes[path]
            probe.clear()
            params = [p for p in module.parameters(recurse=False) if p.requires_grad]
            device = next(module.parameters(recurse=False)).device
            if len(probe.sinks) < probe.calls or probe.sinks[0].device != device:
                probe.sinks = [
                    torch.zeros(len(RAW), device=device, requires_grad=True)
                    for _ in range(probe.calls)
                ]
            for sink in probe.sinks:
                sink.grad = None
            self._handles += [p.register_hook(functools.partial(_note, probe)) for p in params]
            self._before[path] = [sampled(p.detach(), _WATCHED).clone() for p in params]
            probe.active = True

    def end(self, group: Any = None, alone: bool = False) -> dict[str, ModuleStatistics]:
        """What was measured since `begin`, by path, and stop.

        Args:
            group: the ranks to reduce over, of torch.distributed; None: the default group where
                it is initialized.
            alone: do not reduce.
        """
        self.stop()
        for path, module in self.units.items():
            self.probes[path].note("weights", list(module.parameters(recurse=False)))
        rows, updates = self._to_host()
        if not alone and torch.distributed.is_available() and torch.distributed.is_initialized():
            home = next(self.root.parameters()).device
            rows, updates = _agreed(rows, updates, home, group)
        found = {}
        for index, (path, probe) in enumerate(self.probes.items()):
            mine = rows[index * len(KINDS) :][: len(KINDS)]
            values = {k: _statistics(row) for k, row in zip(KINDS, mine, strict=True)}
            if values["output"] is not None:
                values["gradient"] = self._without_region(path, values["gradient"])
                update = updates[index] if updates[index] >= 0 else None
                one = ModuleStatistics(update=update, work=probe.work)
                found[path] = one._replace(**values)  # type: ignore[arg-type]
            probe.clear()
        return found

    def _without_region(self, path: str, gradient: Statistics | None) -> Statistics | None:
        """A gradient with amax and rms as they are without the 2**j of the region around it."""
        rules = rules_of(self.root)
        if gradient is None or rules is None or not path:
            return gradient
        around = rules.policy_for(path.rpartition(".")[0]).shift
        amax, rms = (math.ldexp(value, -around) for value in (gradient.amax, gradient.rms))
        return gradient._replace(amax=amax, rms=rms)

    def _to_host(self) -> tuple[list[Row], list[float]]:
        """The numbers of every unit and kind, and the updates, in one transfer a device."""
        keys: list[tuple[str, str]] = []
        samples: list[Sample] = []
        for path, probe in self.probes.items():
            for kind in KINDS:
                keys += [(path, kind)] * len(probe.noted.get(kind, ()))
                samples += probe.noted.get(kind, ())
        taps = [
            (path, sink.grad)
            for path, probe in self.probes.items()
            for sink in probe.sinks
            if sink.grad is not None
        ]
        home = next(self.root.parameters()).device
        parts = [numbers(_on(samples, home)).flatten()] if samples else []
        parts += [grad.to(home) for _, grad in taps]
        parts.append(torch.stack([self._update(path).to(home) for path in self.units]))
        flat = torch.cat(parts).tolist()
        collected: dict[tuple[str, str], list[Row]] = {}
        for number, key in enumerate([*keys, *((path, "gradient") for path, _ in taps)]):
            row = tuple(flat[number * len(RAW) :][: len(RAW)])
            collected.setdefault(key, []).append(row)
        rows = [merged(collected.get((p, k), ())) or ZEROS for p in self.units for k in KINDS]
        return rows, flat[len(flat) - len(self.units) :]

    def stop(self) -> None:
        """Measure no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for probe in self.probes.values():
            probe.active = False

    def _update(self, path: str) -> Tensor:
        """Median of |dw| / |w| over the sampled nonzero weights, 0-d; -1 where there is none."""
        params = [p for p in self.units[path].parameters(recurse=False) if p.requires_grad]
        before = self._before.get(path, [])
        if not before or len(before) != len(params):
            return torch.full((), -1.0, device=self.probes[path].sinks[0].device)
        old = torch.cat([b.float() for b in before])
        new = torch.cat([sampled(p.detach(), _WATCHED).float() for p in params])
        moved = torch.where(old != 0, (new - old).abs() / old.abs(), torch.nan)
        return torch.nan_to_num(moved.nanmedian(), nan=-1.0)


def _note(probe: Probe, grad: Tensor) -> None:
    if probe.active:
        probe.note("weight_gradient", grad)


def _is_watched(module: Module) -> bool:
    probe = _probe_of(module)
    return probe is not None and not probe.stale


def _probe_of(module: Module) -> Probe | None:
    forward = module.__dict__.get("forward")
    watched = isinstance(forward, functools.partial) and forward.func is observed
    return forward.args[1] if watched and forward is not None else None


def _own_forward(module: Module) -> Any:
    """The instance's own forward, if it has one; without what a copied watch put around it."""
    probe = _probe_of(module)
    return module.__dict__.get("forward") if probe is None else probe.forward


def _statistics(row: Row) -> Statistics | None:
    return Statistics.from_raw(row) if row[RAW.index("size")] else None


def _on(samples: list[Sample], home: torch.device) -> list[Sample]:
    """The samples on one device."""
    if all(sample.part.device == home for sample in samples):
        return samples
    return [
        Sample((s.ends[0].to(home), s.ends[1].to(home)), s.part.to(home), s.size) for s in samples
    ]


def _agreed(
    rows: list[Row], updates: list[float], home: torch.device, group: Any
) -> tuple[list[Row], list[float]]:
    """Over the ranks: amax and updates MAX, the other numbers SUM."""
    table = torch.tensor(rows, device=home)
    largest = torch.cat([table[:, 0], torch.tensor(updates, device=home)])
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
    torch.distributed.all_reduce(table, torch.distributed.ReduceOp.SUM, group=group)
    table[:, 0] = largest[: len(rows)]
    return [tuple(row) for row in table.tolist()], largest[len(rows) :].tolist()
