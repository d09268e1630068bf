"""MasterWeights: float32 masters for the parameters of a low-precision model.

    gradients   master.grad = float32(parameter.grad)     when `param_groups` is read, and in step
    step        inner optimizer over the masters, in float32
    afterwards  parameter = low(master)                   all parameters in one foreach pass

An update far below a low-precision parameter's last bit is lost when it is added to the parameter,
and adds up in a master (Micikevicius et al., 2017, arXiv:1710.03740, section 3.1).

Until an iteration is over, changes of the model's gradients are carried over too, but for those
that come after the scaler has unscaled the masters', or after the masters' were clipped.
"""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from polyamp._errors import BackendError, StateError
from polyamp_torch._cast import LOW
from polyamp_torch._grads import is_fused
from polyamp_torch._pairs import Pair, move, widen, widened

Tensor = torch.Tensor

KEY = "master_weights"
"""Key of the weights in `MasterWeights.state_dict`."""

_SHARED_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_SCALER_ATTRIBUTES = ("grad_scale", "found_inf")


class MasterWeights(Optimizer):
    """An optimizer whose float16 and bfloat16 parameters are stepped as float32 masters.

        optimizer = amp.MasterWeights(torch.optim.AdamW(model.parameters(), fused=True))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)                                     # if clipping
        torch.nn.utils.clip_grad_norm_(optimizer.master_parameters(), 1.0)
        scaler.step(optimizer)                                         # or optimizer.step()
        scaler.update()
        optimizer.zero_grad()

    Wrap before a learning-rate scheduler is made, and use the wrapper from then on. Its
    `param_groups`, `state` and `defaults` are the inner optimizer's, with the masters in the place
    of the parameters; state that exists already moves to them in float32. float32 parameters stay
    as they are; one that becomes low later (`apply_policy`) gets its master then. Backward passes
    accumulate in the model's gradients as ever; `accumulate` adds them up in float32 instead.

    Values written into the model's parameters in place (`model.load_state_dict`, clamping) are
    taken over by the next `step` or `state_dict`, entry by entry; through `.data` they are not
    noticed. After a skipped step nothing has moved, on the host or, with a fused inner optimizer,
    on the device.

    Clip `master_parameters()`. Clipping `model.parameters()` works too while gradients carry no
    scale; after `unscale_` it comes too late, and `step` warns of it. torch.amp.GradScaler works
    as well, but does not tell when it unscales: then that warning is missing, and the late change
    replaces the unscaled gradients.

    Attributes:
        inner: the wrapped optimizer.

    Raises:
        BackendError: `optimizer` is not a torch optimizer, is wrapped already, or is one that
            calls a closure (LBFGS). It is unchanged.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        _check(optimizer)
        self._restore(optimizer, [])
        self._adopt()

    def _restore(self, inner: Optimizer, pairs: list[Pair]) -> None:
        self.inner = inner
        self._pairs = pairs
        self._open = self._summing = self._locked = False
        for name in _SHARED_HOOKS:
            setattr(self, name, getattr(inner, name))
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._warned_capturable_if_run_uncaptured = True
        self._patch_step_function()

    # What the inner optimizer has.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups; reading them brings the masters' gradients up to date."""
        self._collect()
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state, by master."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's defaults."""
        return self.inner.defaults

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return is_fused(self.inner)

    def __repr__(self) -> str:
        return f"MasterWeights({self.inner!r})"

    # Parameters.

    def master_parameters(self) -> Iterator[Tensor]:
        """All parameters that are stepped, gradients up to date: masters, and float32 ones."""
        for group in self.param_groups:
            yield from group["params"]

    def master_of(self, param: Tensor) -> Tensor:
        """The float32 master of a parameter of the model; the parameter itself if it has none."""
        return next((pair.master for pair in self._pairs if pair.param is param), param)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's optimizers do; low-precision parameters in it get masters."""
        given = param_group["params"]
        params = [given] if isinstance(given, Tensor) else list(given)
        pairs = self._new_pairs(params)
        self.inner.add_param_group({**param_group, "params": self._with_masters(params, pairs)})
        self._pairs += pairs

    def _adopt(self) -> None:
        """Give masters to the low-precision parameters that have none."""
        for group in self.inner.param_groups:
            if all(param.dtype not in LOW for param in group["params"]):
                continue
            pairs = self._new_pairs(group["params"])
            group["params"] = self._with_masters(group["params"], pairs)
            self._pairs += pairs
            for pair in pairs:
                if pair.param in self.inner.state:
                    self.inner.state[pair.master] = widened(self.inner.state.pop(pair.param))

    def _new_pairs(self, params: Iterable[Any]) -> list[Pair]:
        known = {id(pair.param) for pair in self._pairs}
        pairs = []
        for entry in params:
            param = entry[1] if isinstance(entry, tuple) else entry
            if isinstance(param, Tensor) and param.dtype in LOW and id(param) not in known:
                known.add(id(param))
                wide = param.detach().to(torch.float32)
                pairs.append(Pair(param, torch.nn.Parameter(wide, param.requires_grad)))
        return pairs

    def _with_masters(self, params: Iterable[Any], pairs: list[Pair]) -> list[Any]:
        master = {id(pair.param): pair.master for pair in (*self._pairs, *pairs)}
        return [
            (entry[0], master.get(id(entry[1]), entry[1]))
            if isinstance(entry, tuple)
            else master.get(id(entry), entry)
            for entry in params
        ]

    # Gradients.

    @torch.no_grad()
    def _collect(self) -> bool:
        """Widen what is new among the model's gradients; whether a change came too late."""
        if not self._open:
            self._adopt()
        late, new = False, []
        for pair in self._pairs:
            if pair.is_current():
                continue
            if self._locked or (self._open and pair.was_touched()):
                late = late or pair.param.grad is not None
                continue
            new.append(pair)
        if self._summing:
            move(new)
        elif new:
            widen(new)
            self._open = True
        return late

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the model's gradients to float32 sums in the masters, and set them to None.

        Call it after the backward passes of an accumulation window, where it may be left out
        after the last. The sums end with the next step, skipped or not, or with `zero_grad`.

        Raises:
            BackendError: the sums were unscaled already. Nothing is changed.
        """
        if self._locked:
            raise BackendError(
                "accumulate() came between the scaler's unscale_ and step: what it adds would still"
                " carry the scale. Call it before unscale_"
            )
        if not self._summing:
            for pair in self._pairs:
                pair.master.grad = None
        self._summing = self._open = True
        move([pair for pair in self._pairs if pair.param.grad is not None])

    def _gradients_unscaled(self) -> None:
        """The masters' gradients are unscaled: the model's come too late now. Scalers call it."""
        self._locked = True

    def _iteration_over(self) -> None:
        """An iteration is over: gradients that change from here on are new. Scalers call it."""
        if self._summing:
            for pair in self._pairs:
                pair.forget()
        self._open = self._summing = self._locked = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model and of the masters.

        Args:
            set_to_none: free them all; else fill them with zeros and keep the memory.
        """
        self.inner.zero_grad(set_to_none)
        self._iteration_over()
        for pair in self._pairs:
            if set_to_none:
                pair.param.grad = None
                pair.note(None)
            elif pair.param.grad is not None:
                pair.param.grad.detach_().zero_()

    # Weights.

    def step(self, closure: None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Step the masters and copy them into the model.

        Args:
            closure: refused.
            **kwargs: passed on to the inner optimizer's `step`.

        Returns:
            What the inner optimizer's `step` returns.

        Raises:
            BackendError: a closure was passed. Nothing is changed.
        """
        if closure is not None:
            raise BackendError(
                "MasterWeights.step() takes no closure: it would run backward after the masters'"
                " gradients were collected. Run backward first, then call step()"
            )
        self._take_over()
        if self._collect():
            warnings.warn(
                "the model's gradients changed after they were unscaled into the masters, too late"
                " for this step; clip with clip_grad_norm_(optimizer.master_parameters(), ...)"
                " instead of model.parameters(), or with scaler.clip_and_step",
                UserWarning,
                stacklevel=3,
            )
        given = [name for name in _SCALER_ATTRIBUTES if name in self.__dict__]
        for name in given:
            setattr(self.inner, name, getattr(self, name))
        try:
            result = self.inner.step(**kwargs)
        finally:
            for name in given:
                delattr(self.inner, name)
        self._iteration_over()
        self.write_back()
        return result

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the masters into the model; only needed after something but `step` changed them."""
        if self._pairs:
            torch._foreach_copy_([p.param for p in self._pairs], [p.master for p in self._pairs])
        for pair in self._pairs:
            pair.written = pair.param._version

    @torch.no_grad()
    def _take_over(self) -> None:
        for pair in self._pairs:
            pair.follow()

    # Saving.

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state_dict with one key more, "master_weights".

        It holds, by the index that `param_groups` there gives a parameter, its float32 weights:
        masters and float32 parameters alike (the tensors themselves, not copies). So it loads
        whatever the precision of the model that it is loaded for. An optimizer without masters
        ignores the key.
        """
        self._take_over()
        saved: dict[str, Any] = self.inner.state_dict()
        saved[KEY] = {
            index: param.detach()
            for index, param in self._indexed(saved)
            if param.dtype == torch.float32
        }
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state_dict, of this class over a model of any precision or of the inner one.

        Masters and model get the saved weights; where there are none, as in an optimizer's own
        state_dict, masters follow the model. Load the model first where its precision has changed:
        written afterwards, its rounded weights would be taken over.

        Raises:
            StateError: the weights are not those of these parameters.
            ValueError: the groups are not those of this optimizer (as torch).
        """
        weights = self._checked_weights(state_dict)
        self._take_over()
        self.inner.load_state_dict({k: v for k, v in state_dict.items() if k != KEY})
        for param, value in weights:
            param.copy_(value)
        self.write_back()
        self._iteration_over()

    def _indexed(self, saved: Mapping[str, Any]) -> Iterator[tuple[int, Tensor]]:
        for theirs, ours in zip(saved["param_groups"], self.inner.param_groups, strict=False):
            yield from zip(theirs["params"], ours["params"], strict=False)

    def _checked_weights(self, saved: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
        weights = saved.get(KEY, {})
        if not isinstance(weights, Mapping):
            raise StateError(f"{KEY} must be a dict of tensors, got {type(weights).__name__}")
        params = dict(self._indexed(saved))
        for index, value in weights.items():
            if index not in params or not isinstance(value, Tensor):
                raise StateError(f"{KEY}[{index!r}] is not a tensor of a parameter in param_groups")
            if value.shape != params[index].shape:
                raise StateError(
                    f"{KEY}[{index!r}] has shape {tuple(value.shape)}, the parameter"
                    f" {tuple(params[index].shape)}: is it the same model?"
                )
        return [(params[index], value) for index, value in weights.items()]

    def __getstate__(self) -> dict[str, Any]:
        self._take_over()
        return {"inner": self.inner, "pairs": [(p.param, p.master) for p in self._pairs]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._restore(state["inner"], [Pair(*pair) for pair in state["pairs"]])


def _check(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise BackendError(
            f"MasterWeights wraps a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if isinstance(optimizer, MasterWeights):
        raise BackendError("this optimizer has master weights already: use it as it is")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise BackendError(
            f"{type(optimizer).__name__}.step calls a closure, which master weights do not allow:"
            " use an optimizer that steps on gradients computed before"
        )
