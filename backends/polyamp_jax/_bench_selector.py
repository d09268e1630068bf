"""`polyamp bench jax-selector`: a training step under Adaptive beside the same without.

    ratio = (49 * step without statistics + step with them) / 50, over a plain step

each a case of its own, side by side. All compute under the same policy.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from polyamp._selection import Capabilities
from polyamp.bench.harness import Case, Tell, corrected_ratio, interleaved, ratio
from polyamp.bench.report import Report, Row
from polyamp_jax._adaptive import Adaptive
from polyamp_jax._bench import device, versions
from polyamp_jax._bench_model import WIDTHS, batch, optimizer
from polyamp_jax._compat import compiled_count
from polyamp_jax._gradients import Plan, value_grad_and_statistics
from polyamp_jax._modules import apply_policy
from polyamp_jax._scaler import loss_scaled, step
from polyamp_jax._units import units

LIMIT = 1.02
"""Largest time over that without statistics."""
SIZE, EVERY = 128, 50


class Mlp(nn.Module):
    """The model of `polyamp bench jax-step`, as a module."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Logits."""
        for width in WIDTHS[1:-1]:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(WIDTHS[-1])(x)


TX = loss_scaled(optimizer())


def train_step(params: Any, opt_state: Any, x: Any, labels: Any, plan: Plan) -> Any:
    """(params, opt_state), statistics."""

    def loss_fn(params: Any) -> Any:
        logits = apply_policy(Mlp(), plan.policy).apply({"params": params}, x)
        losses = optax.softmax_cross_entropy_with_integer_labels(jnp.float32(logits), labels)
        return losses.mean()

    loss, grads, found = value_grad_and_statistics(loss_fn, plan)(opt_state, params)
    return step(TX, grads, opt_state, params, loss=loss), found


def case(jitted: Any, every: int | None) -> Case:
    """One step of a training that goes on from call to call.

    Args:
        jitted: `train_step`.
        every: of `Adaptive`; None: a plain step.
    """
    x, labels = batch(SIZE)
    adaptive = Adaptive(units(Mlp(), x), capabilities=Capabilities(frozenset()), every=every or 1)
    plain = adaptive.plan._replace(sampling=False)
    params = Mlp().init(jax.random.key(0), x)["params"]
    held = [(params, TX.init(params))]

    def run() -> float:
        start = time.perf_counter()
        plan = plain if every is None else adaptive.plan
        state, found = jitted(*held.pop(), x, labels, plan=plan)
        if every is not None:
            adaptive.update(found, state[1])
        jax.block_until_ready(state)
        seconds = time.perf_counter() - start
        held.append(state)
        return seconds

    return run


def jax_selector(quick: bool, tell: Tell) -> Report:
    """The ratio on JAX's default device."""
    rounds = 100 if quick else 400
    tell(f"jax-selector: {rounds} rounds of 4 steps")
    jitted = jax.jit(train_step, donate_argnums=(0, 1), static_argnames="plan")
    kinds = {"unsampled": 10**9, "sampled": 1, "plain": None, "again": None}
    cases = {label: case(jitted, every) for label, every in kinds.items()}
    times = interleaved(cases, rounds, warmup=5)
    pairs = zip(times["unsampled"], times["sampled"], strict=True)
    ours = [((EVERY - 1) * plain + sampled) / EVERY for plain, sampled in pairs]
    found = corrected_ratio(ours, times["plain"], times["again"])
    own = ratio(times["again"], times["plain"])
    milli = [1e3 * statistics.median(times[name]) for name in ("unsampled", "plain")]
    extra = ratio(times["sampled"], times["plain"])
    rows = [
        Row("step without statistics, time", milli[0], "ms", milli[1]),
        Row("ratio", found.value, "ratio", own.value, LIMIT),
        Row("ratio, low", found.low, "ratio", own.low),
        Row("ratio, high", found.high, "ratio", own.high),
        Row("a step with statistics", extra.value, "ratio", 1.0),
        Row("compilations", compiled_count(jitted), "count", None, 2),
    ]
    return Report(
        "jax-selector",
        device(),
        versions(),
        rows,
        [
            f"an MLP of 1.9M parameters in float32, batches of {SIZE}; statistics in one of {EVERY}"
            " steps; peer: the same policy without Adaptive, corrected by its ratio to itself.",
        ],
    )
