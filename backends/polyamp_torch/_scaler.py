"""GradScaler: torch.amp.GradScaler's interface over polyamp's state machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from polyamp._errors import StateError
from polyamp._interchange import scaler_from_dict
from polyamp._module_scales import SavedShifts, shifts_from_dict
from polyamp._policy import Policy, parse_policy
from polyamp._policy_map import PolicyMap
from polyamp._scaling import Rule
from polyamp._state import (
    Decision,
    ScalerState,
)
from polyamp_torch._arguments import (
    TORCH,
    DefaultFloat,
    DefaultInt,
    is_given,
    rule_from,
    whole,
)
from polyamp_torch._cast import default_device_type, scaled
from polyamp_torch._grads import Gradients, combined
from polyamp_torch._inspect import signal_of
from polyamp_torch._per_module import modules_of
from polyamp_torch._reports import Reports
from polyamp_torch._state import Keeper
from polyamp_torch._state_dict import EXTRA, export_state, import_state, portable

Tensor = torch.Tensor


class GradScaler(Reports):
    """A drop-in for `torch.amp.GradScaler`, on CPU and accelerators, under any polyamp rule.

        scaler = amp.GradScaler("cuda")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    Same constructor, methods, call-order errors and state_dict as torch's, and its default
    behaviour, but: the scale never reaches 0; overflow is judged on the unscaled gradients; a
    parameter that two optimizers share is unscaled once; an error leaves both usable; skipped steps
    are warned about and told apart.

    With the scale on the CPU all deciding is done on the host. On an accelerator it is done
    there: `step` with a fused optimizer, and `update`, do not wait for it (but for the first steps
    of SGD with momentum, and a gradient shared after a fused step); `last_decision` then holds 0-d
    tensors, and what happened is reported by the next `check` or `get_scale`.

    Args:
        device: "cuda", "cpu" or another device type.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        rule: a `polyamp.Rule` or the name of a system ("megatron", "deepspeed-zero", ...) in place
            of the four numbers.
        policy: a Policy, PolicyMap or policy string; scaling is off where it needs none (bfloat16,
            float32), unless `rule` asks for it. Otherwise `enabled` decides.
        min_scale, max_scale, hysteresis: as in `polyamp.Dynamic`, beside the four numbers.
        model: what a rule with `per_module=True` measures, and gives its float16 modules powers of
            two in; other rules do nothing with it. Copies and pickles of the scaler have none.
        late: `update` makes the transition of the step before, on the host, from numbers that have
            arrived meanwhile: on CUDA nothing is computed for the state on the device, and the host
            is at most a step ahead. Steps are applied or skipped on time all the same. Between
            iterations `state`, `get_scale()`, `check()`, `to_dict()` and `state_dict()` wait and
            make the transition that is outstanding.

    Raises:
        RuleError: a parameter outside its range, both a rule and parameters of one, or a rule with
            per_module=True and no model, or a model with float16 parameters.
        PolicyError: `policy` is not one.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = DefaultFloat(2.0**16),
        growth_factor: float = DefaultFloat(2.0),
        backoff_factor: float = DefaultFloat(0.5),
        growth_interval: int = DefaultInt(2000),
        enabled: bool = True,
        *,
        rule: Rule | str | None = None,
        policy: Policy | PolicyMap | str | None = None,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int | None = None,
        model: torch.nn.Module | None = None,
        late: bool = False,
    ) -> None:
        given = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": whole(growth_interval),
            "min_scale": min_scale,
            "max_scale": max_scale,
            "hysteresis": hysteresis,
        }
        given = {name: value for name, value in given.items() if is_given(value)}
        if policy is not None and rule is None:
            chosen = policy if isinstance(policy, PolicyMap) else parse_policy(policy)
            enabled = enabled and chosen.needs_scaling
        self._keeper = Keeper(rule_from(rule, given) if enabled else TORCH)
        self._modules = modules_of(self._keeper.rule, model)
        self._force_device_mode, self._late, self._scaled = False, bool(late), False
        self._known_row = self._told = 0
        self._last_decision: Decision | None = None
        self._gradients = Gradients()
        self._results, self._losses = {}, []
        self._constructed = False
        super().__init__(device, self._keeper.rule.init_scale, enabled=enabled)
        self._constructed = True
        self._init_growth_tracker = self._keeper.read(None, None).clean

    @property
    def rule(self) -> Rule:
        """The rule in force."""
        return self._keeper.rule

    # Scaling and unscaling.

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        with torch.inference_mode(False):
            super()._lazy_init_scale_growth_tracker(dev)

    def scale(self, outputs: Any) -> Any:
        """`outputs` times the scale, as a new tensor or collection; unchanged if disabled.

        Args:
            outputs: a tensor, or lists, tuples, dicts and other iterables of tensors, nested as
                you like; collections come back as they are, other iterables as generators. float16
                tensors with dimensions come back as float32. With a rule that follows the range, a
                value that is not finite skips the iteration and leaves the scale alone.

        Raises:
            ValueError: there is something else in `outputs`.
        """
        if not self._enabled:
            return outputs
        scale, self._scaled = self._scale, True
        self._note_losses(outputs)
        if type(outputs) is Tensor and scale is not None and outputs.device == scale.device:
            self._gradients.clear()
            return scaled(outputs, lambda _: scale)
        copies: dict[torch.device, Tensor] = {}

        def scale_on(device: torch.device) -> Tensor:
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(device)
            if device not in copies:
                waits = device.type == "cpu"  # else the copy could be read before it has arrived
                copies[device] = cast(Tensor, self._scale).to(
                    device, non_blocking=not waits, copy=not isinstance(outputs, Tensor)
                )
            return copies[device]

        result = scaled(outputs, scale_on)
        self._gradients.clear()
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Take the iteration's one decision: grow, keep or cut the scale.

        Args:
            new_scale: set the scale to this instead: a positive finite number, or a one-element
                float tensor on the scaler's kind of device. Lifted to the rule's floor; it may be
                above the ceiling. On an accelerator, where it cannot be looked at without waiting,
                a tensor that is not positive and finite is passed over.

        Raises:
            AssertionError: no optimizer was checked since the last update (as torch).
            RuleError: `new_scale` is not a positive finite number; or the rule needs the largest
                gradient and an optimizer unscaled by itself, so that nobody measured it.
            ScaleFloorError: the rule gave up (host mode). The scaler stays usable.
        """
        if not self._enabled:
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        records = list(self._per_optimizer_states.values())
        if new_scale is not None:
            self._scaled = False
            self._settle()
            self._set_scale(scale, new_scale)
        else:
            found = [flag for r in records for flag in r["found_inf_per_device"].values()]
            if not found:
                raise AssertionError(
                    "update() found no inf checks: call scaler.step(optimizer), with gradients"
                    " there, before it"
                )
            signal = signal_of(combined(found, scale.device) == 0.0, records, self._losses)
            self._last_decision = (
                self._keeper.advance_late(scale, tracker, signal)
                if self._late
                else self._keeper.advance(scale, tracker, signal, self._on_device(scale))
            )
        self._abandon()
        if self._modules is not None:
            last = self._last_decision if new_scale is None else None
            # On a device the flag is there too late to be worth waiting for.
            self._modules.step(skipped=last is not None and last.applied is False)
        if new_scale is not None:
            return
        if self._on_device(scale) and not self._late:
            self._warn_of_known_skips(records)
        else:
            self._report(self._keeper.read(None, None), stacklevel=2)

    def _settle(self) -> None:
        """Make the transition that a late scaler still owes, unless gradients carry the scale."""
        scale, tracker = getattr(self, "_scale", None), getattr(self, "_growth_tracker", None)
        between = self._late and not self._scaled
        if between and scale is not None and tracker is not None:
            self._last_decision = self._keeper.settle(scale, tracker) or self._last_decision

    def _abandon(self) -> None:
        """Forget what was found of this iteration's gradients."""
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._gradients.clear()
        self._losses.clear()
        self._scaled = False

    def check(self) -> None:
        """Read the state and report what happened since the last look: warn of skips, raise faults.

        On an accelerator this waits for it; with the scale on the CPU `update` has reported.

        Raises:
            ScaleFloorError: the rule gave up.
        """
        self._check(stacklevel=2)

    def _check(self, stacklevel: int) -> None:
        if not self._enabled or self._scale is None:
            return
        if self._late or self._on_device(self._scale):
            self._report(self.state, stacklevel + 1)

    def get_scale(self) -> float:
        """The current scale as a float, 1.0 if disabled; on an accelerator it waits, and checks.

        Raises:
            ScaleFloorError: as `check`.
        """
        self._check(stacklevel=2)
        return super().get_scale()

    @property
    def last_decision(self) -> Decision | None:
        """The decision of the last `update`, or None: numbers, or 0-d tensors on an accelerator.

        Of a late scaler it is that of the step before, until something settles it.
        """
        return self._last_decision

    @property
    def module_shifts(self) -> dict[str, int]:
        """j of the modules whose gradients are multiplied by 2**j of their own, by path."""
        return {} if self._modules is None else dict(self._modules.shifts)

    # State.

    @property
    def state(self) -> ScalerState:
        """The whole state in Python numbers; on an accelerator reading it waits."""
        self._settle()
        state = self._keeper.read(
            getattr(self, "_scale", None), getattr(self, "_growth_tracker", None)
        )
        if getattr(self, "_scale", None) is None and self._enabled:
            return state._replace(
                loss_scale=float(self._init_scale), clean=self._init_growth_tracker
            )
        return state

    def state_dict(self) -> dict[str, Any]:
        """The state as torch's five keys, {} if disabled.

        A sixth key, "polyamp", holds rule and state in portable form, only where torch's keys do
        not say everything that later decisions depend on. Without it the counters of `state` start
        again at 0 when loaded. torch's GradScaler loads either.
        """
        return export_state(self._keeper.rule, self.state, self._modules) if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state_dict of torch's GradScaler or of this one; no-op if disabled.

        The portable form of `to_dict` is taken too.

        Rule parameters come with it, as in torch. A scale of 0 is lifted to the floor, with a
        warning.

        Raises:
            RuntimeError: the dict is empty, as a disabled scaler's is (as torch).
            StateError: a key is missing or a value is wrong. The scaler is unchanged.
        """
        if self._enabled:
            rule, state = import_state(state_dict, self._keeper.rule)
            self._go_on(rule, state, self._saved_modules(rule, state_dict))

    def _saved_modules(self, rule: Rule, saved: Mapping[str, Any]) -> SavedShifts | None:
        """What is saved of the modules, looked over, where the saved rule asks for them."""
        if not getattr(rule, "per_module", False):
            return None
        if self._modules is None:
            raise StateError(
                "the saved rule has per_module=True, and this scaler has no model:"
                " GradScaler(rule=..., model=model), or GradScaler.from_dict(saved, model=model)"
            )
        saved = saved if saved.get("kind") == "scaler" else saved.get(EXTRA, {})
        if "modules" not in saved:
            return None
        found = shifts_from_dict(saved["modules"])
        self._modules.check(found)
        return found

    def _go_on(self, rule: Rule, state: ScalerState, modules: SavedShifts | None) -> None:
        if self._modules is not None and modules is not None:
            self._modules.load(modules)
        elif self._modules is not None and not getattr(rule, "per_module", False):
            self._modules.stop()
            self._modules = None
        self._keeper.use_rule(rule)
        self._keeper.load(state)
        self._told, self._known_row = state.skipped, state.skipped_in_a_row
        self._init_scale, self._init_growth_tracker = state.loss_scale, state.clean
        if self._scale is not None and self._growth_tracker is not None:
            self._scale.fill_(state.loss_scale)
            self._growth_tracker.fill_(state.clean)

    def to_dict(self) -> dict[str, Any]:
        """Rule and state, counters included, in polyamp's portable JSON form; {} if disabled."""
        return portable(self._keeper.rule, self.state, self._modules) if self._enabled else {}

    @classmethod
    def from_dict(
        cls,
        data: Mapping[str, Any],
        device: str | None = None,
        model: torch.nn.Module | None = None,
    ) -> GradScaler:
        """A new scaler that goes on from `to_dict` of any framework.

        Args:
            data: what `to_dict` gave; that of a disabled scaler makes a disabled one.
            device: as in the constructor; by default "cuda" where there is one, else "cpu".
            model: as in the constructor, its policy applied.

        Raises:
            StateError: `data` is not a saved scaler, or one of another model.
            RuleError: the saved rule has per_module=True and there is no model.
        """
        device = device or default_device_type()
        if isinstance(data, Mapping) and not data:
            return cls(device, enabled=False)
        rule, state = scaler_from_dict(data)
        scaler = cls(device, rule=rule, model=model)
        if scaler._enabled:
            scaler._go_on(rule, state, scaler._saved_modules(rule, data))
        return scaler

    def __getstate__(self) -> dict[str, Any]:
        if self._enabled:
            waiting = self._per_optimizer_states.values()
            if any(r["stage"] is not OptState.READY or r["found_inf_per_device"] for r in waiting):
                raise AssertionError(
                    "a GradScaler can be pickled or copied only between iterations: call update()"
                    " first"
                )
        saved = self.__dict__.copy()
        if self._enabled:
            state = self.state
            saved["_keeper"] = Keeper(self._keeper.rule)
            saved["_keeper"].load(state)
            saved["_init_scale"], saved["_init_growth_tracker"] = state.loss_scale, state.clean
            saved["_scale"] = saved["_growth_tracker"] = None
            saved["_per_optimizer_states"] = defaultdict(_refresh_per_optimizer_state)
        saved["_last_decision"] = saved["_modules"] = None
        del saved["_results"], saved["_gradients"]
        return saved

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._gradients, self._results = Gradients(), {}
