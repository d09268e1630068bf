"""The demo's training loop in JAX (flax nnx, optax), with its measuring of time and memory."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import polyamp.jax as amp
from polyamp import BackendError, Policy
from polyamp.bench.harness import cpu_name
from polyamp.demo import Device, OnStep, Result, Settings, Task
from polyamp_jax._demo_models import build
from polyamp_jax._ops import devices_by_name
from polyamp_jax._plan import rules_of

Array = jax.Array

_EVAL_BATCH = 256


def versions() -> dict[str, str]:
    """Versions of JAX, flax and optax."""
    return {"jax": jax.__version__, "flax": flax.__version__, "optax": optax.__version__}


def device(requested: str | None) -> Device:
    """`requested` ("cpu", "cuda", "cuda:N"), or by default JAX's own choice.

    Raises:
        BackendError: no such device.
    """
    known = devices_by_name()
    default = jax.devices()[0]
    name = requested or next(name for name, device in known.items() if device == default)
    name = name if name in known else f"{name}:0"
    if name not in known:
        raise BackendError(
            f"jax has no device {requested!r} here; choose one of: {', '.join(known)}"
        )
    if name == "cpu":
        return Device(name, cpu_name())
    return Device(name, known[name].device_kind, accelerator=True)


def check(policy: Policy, device: Device) -> None:
    """Raise PolicyError where `apply_policy` cannot follow `policy`."""
    rules_of(policy, ops=())


def train(task: Task, policy: Policy, settings: Settings, device: str, on_step: OnStep) -> Result:
    """Train `task` under `policy` on `device` and evaluate; see `DemoBackend`."""
    with jax.default_device(devices_by_name()[device]):
        model = amp.apply_policy(build(task, settings), policy)
        tx = _optimizer(task, settings)
        if policy.needs_scaling:
            tx = amp.loss_scaled(tx)
        graph, params, *rest = nnx.split(model, nnx.Param, ...)
        state = _State(params, rest[0], tx.init(params))
        data = jnp.asarray(task.inputs), jnp.asarray(task.targets)
        windows = jnp.asarray(task.batches(settings))
        step = jax.jit(_step(graph, tx, policy.needs_scaling), donate_argnums=0)
        compiled = step.lower(state, *data, windows[0]).compile()
        times, losses = [], []
        for number, window in enumerate(windows, start=1):
            start = time.perf_counter()
            state, loss = compiled(state, *data, window)
            losses.append(float(loss))
            times.append(1e3 * (time.perf_counter() - start))
            on_step(number, losses[-1])
        scaler = amp.scaler_state(state.opt_state) if policy.needs_scaling else None
        return Result(
            step_ms=statistics.median(times[len(times) // 10 :]),
            memory_bytes=_temporaries(compiled),
            memory_kind="step temporaries",
            metric=_evaluate(task, nnx.merge(graph, state.params, state.rest)),
            skipped=0 if scaler is None else int(scaler.skipped),
            scale=None if scaler is None else float(scaler.loss_scale),
            losses=tuple(losses),
        )


def _temporaries(compiled: Any) -> int:
    return int(compiled.memory_analysis().temp_size_in_bytes)


class _State(NamedTuple):
    """What a step changes: parameters, what else the model keeps (BatchNorm), the optimizer's."""

    params: Any
    rest: Any
    opt_state: Any


def _step(graph: Any, tx: Any, scaled: bool) -> Callable[..., tuple[_State, Array]]:
    """One optimizer step over a window of micro-batches, or a skip of the whole window."""

    def loss_of(params: Any, rest: Any, inputs: Array, targets: Array) -> tuple[Array, Any]:
        model = nnx.merge(graph, params, rest, copy=True)
        loss = cross_entropy(model(inputs), targets)
        return loss, nnx.state(model, nnx.Not(nnx.Param))

    def step(state: _State, inputs: Array, targets: Array, window: Array) -> tuple[_State, Array]:
        rest, total, grads = state.rest, jnp.zeros(()), None
        for samples in window:
            batch = inputs[samples], targets[samples]
            if scaled:
                grad_of = amp.value_and_grad(loss_of, has_aux=True)
                (loss, rest), part = grad_of(state.opt_state, state.params, rest, *batch)
            else:
                grad_of = jax.value_and_grad(loss_of, has_aux=True)
                (loss, rest), part = grad_of(state.params, rest, *batch)
            part = jax.tree.map(lambda g: g / len(window), part)
            grads = part if grads is None else jax.tree.map(jnp.add, grads, part)
            total += loss / len(window)
        if scaled:
            params, opt_state, rest = amp.step(
                tx, grads, state.opt_state, state.params, loss=total, extra=(state.rest, rest)
            )
        else:
            updates, opt_state = tx.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        return _State(params, rest, opt_state), total

    return step


def cross_entropy(logits: Array, targets: Array) -> Array:
    """Mean over all targets, nats."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def _evaluate(task: Task, model: nnx.Module) -> float:
    """`task.metric` on the held-out samples."""
    model.eval()
    graph, state = nnx.split(model)
    logits_of = jax.jit(lambda state, inputs: nnx.merge(graph, state)(inputs))
    correct, nats = 0, 0.0
    for start in range(0, len(task.held_inputs), _EVAL_BATCH):
        part = slice(start, start + _EVAL_BATCH)
        logits = logits_of(state, jnp.asarray(task.held_inputs[part]))
        targets = task.held_targets[part]
        correct += int((np.asarray(logits).argmax(-1) == targets).sum())
        nats += float(cross_entropy(logits, jnp.asarray(targets))) * targets.size
    count = task.held_targets.size
    return correct / count if task.metric == "accuracy" else nats / count / math.log(2)


def _optimizer(task: Task, settings: Settings) -> optax.GradientTransformation:
    warm_up = max(1, settings.steps // 20)

    def rate(count: Any) -> Any:
        cosine = 0.5 + 0.5 * jnp.cos(jnp.pi * count / settings.steps)
        return settings.learning_rate * jnp.minimum(1.0, (count + 1) / warm_up) * cosine

    if task.name == "digits":
        inner = optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(rate, momentum=0.9))
    else:
        inner = optax.adamw(rate, b2=0.98, weight_decay=1e-2)
    if settings.max_norm is None:
        return inner
    return optax.chain(optax.clip_by_global_norm(settings.max_norm), inner)
