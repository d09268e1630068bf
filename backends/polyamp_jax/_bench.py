"""`polyamp bench jax-step`: loss scaling beside flax's and jmp's, all over the plain step."""

from __future__ import annotations

import importlib.util
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax

import polyamp
from polyamp.bench.harness import (
    Case,
    Tell,
    corrected_ratio,
    cpu_name,
    in_fresh_python,
    interleaved,
    ratio,
)
from polyamp.bench.report import Report, Row
from polyamp_jax._bench_model import batch, loss_of, optimizer, parameters, plain_step
from polyamp_jax._compat import compiled_count
from polyamp_jax._gradients import value_and_grad
from polyamp_jax._ops import devices_by_name
from polyamp_jax._scaler import loss_scaled, step

RATIO_LIMIT = 1.06
"""Largest step time over the plain step's at a batch of 128."""
SHARE_LIMIT = 0.5
"""Largest overhead at a batch of 16 as a share of the better peer's."""
MEMORY_LIMIT = 1.5
"""MiB of temporaries beyond the plain step's."""
RULE_LIMITS = {"ratio": 1.06, "MiB": 1.0}
"""Of another rule over `Dynamic`: largest step time, largest difference of temporaries."""
PEERS = ("flax", "jmp")


@dataclass(frozen=True)
class Way:
    """One way to train: what it keeps beside parameters and optimizer state, and its step.

    `step(params, opt_state, scaler, x, labels) -> (params, opt_state, scaler, loss)`.
    """

    step: Callable[..., Any]
    tx: optax.GradientTransformationExtraArgs
    scaler: Any = ()

    def start(self) -> tuple[Any, Any, Any]:
        """Fresh parameters, optimizer state and scaler, in buffers of their own."""
        params = parameters()
        fresh: tuple[Any, Any, Any] = jax.tree.map(
            lambda leaf: jnp.array(leaf, copy=True), (params, self.tx.init(params), self.scaler)
        )
        return fresh

    def jitted(self) -> Any:
        """The step, jitted; parameters, optimizer state and scaler are donated."""
        return jax.jit(self.step, donate_argnums=(0, 1, 2))

    def compiled(self, size: int) -> Any:
        """The step compiled ahead of time for batches of `size`."""
        return self.jitted().lower(*self.start(), *batch(size)).compile()


def ways(rule: str = "") -> dict[str, Way]:
    """The plain step, polyamp's, flax's, and jmp's where jmp is installed.

    With a rule: the plain step, polyamp's under `Dynamic` twice, and under that rule.
    """
    if rule:
        return {
            "plain": Way(plain_step, optimizer()),
            "Dynamic": _polyamp(),
            "Dynamic again": _polyamp(),
            rule: _polyamp(rule),
        }
    made = {"plain": Way(plain_step, optimizer()), "polyamp": _polyamp(), "flax": _flax()}
    if importlib.util.find_spec("jmp") is not None:
        made["jmp"] = _jmp()
    return made


def _polyamp(rule: str | None = None) -> Way:
    scaled = loss_scaled(optimizer(), rule)
    return Way(partial(_polyamp_step, scaled), scaled)


def _polyamp_step(
    tx: Any, params: Any, opt_state: Any, scaler: Any, x: Any, labels: Any
) -> tuple[Any, Any, Any, Any]:
    loss, grads = value_and_grad(loss_of)(opt_state, params, x, labels)
    params, opt_state = step(tx, grads, opt_state, params)
    return params, opt_state, scaler, loss


def _flax() -> Way:
    from flax.training.dynamic_scale import DynamicScale

    tx = optimizer()

    def train(params: Any, opt_state: Any, scaler: Any, x: Any, labels: Any) -> Any:
        scaler, finite, loss, grads = scaler.value_and_grad(loss_of)(params, x, labels)
        updates, new_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates)
        choose = partial(jnp.where, finite)
        params = jax.tree.map(choose, new, params)
        return params, jax.tree.map(choose, new_state, opt_state), scaler, loss

    return Way(train, tx, DynamicScale())


def _jmp() -> Way:
    import jmp

    tx = optimizer()

    def train(params: Any, opt_state: Any, numbers: Any, x: Any, labels: Any) -> Any:
        scaler = jmp.DynamicLossScale(*numbers)  # jmp 0.0.4's own pytree cannot be lowered

        def scaled_loss(params: Any) -> tuple[Any, Any]:
            loss = loss_of(params, x, labels)
            return scaler.scale(loss), loss

        grads, loss = jax.grad(scaled_loss, has_aux=True)(params)
        grads = scaler.unscale(grads)
        finite = jmp.all_finite(grads)
        updates, new_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates)
        params = jmp.select_tree(finite, new, params)
        opt_state = jmp.select_tree(finite, new_state, opt_state)
        scaler = scaler.adjust(finite)
        return params, opt_state, (scaler.loss_scale, scaler.counter), loss

    return Way(train, tx, (jnp.float32(2.0**15), jnp.int32(0)))


def temporary(compiled: Any) -> float:
    """MiB of temporaries that XLA plans for a compiled step."""
    return float(compiled.memory_analysis().temp_size_in_bytes) / 2**20


def compilations(way: Way, size: int = 16, steps: int = 4) -> int:
    """How often a jitted step compiles in the first steps of a training."""
    jitted, state = way.jitted(), way.start()
    for _ in range(steps):
        *state, _ = jitted(*state, *batch(size))
    return compiled_count(jitted)


def timed(way: Way, size: int) -> Case:
    """Time single steps of a training that goes on from call to call."""
    compiled, data = way.compiled(size), batch(size)
    held: list[Any] = [way.start()]

    def run() -> float:
        start = time.perf_counter()
        *state, _ = jax.block_until_ready(compiled(*held.pop(), *data))
        seconds = time.perf_counter() - start
        held.append(state)
        return seconds

    return run


def jax_step(quick: bool, tell: Tell, rule: str = "") -> Report:
    """Measure both batch sizes in a process each."""
    rounds = 60 if quick else 400
    if rule:
        return _of_rule(rule, rounds, tell)
    rows: list[Row] = []
    for size in (128, 16):
        tell(f"jax-step: batches of {size}, {rounds} rounds of {len(ways())} ways")
        found = in_fresh_python("-m", "polyamp_jax._bench", str(size), str(rounds))
        rows += [Row(**row) for row in found]
    rows += exact_rows()
    notes = [
        "one training step of an MLP of 1.9M parameters under optax.adamw, float32, donated"
        " buffers, with the loss scaler of each.",
        "ratio: median paired time over the same step without loss scaling; low and high: its 95 %"
        " interval. overhead: ratio - 1; its limit is half of the better of the peers.",
        "temporaries: MiB that XLA plans beyond the plain step's.",
    ]
    if "jmp" not in ways():
        notes.append("jmp is not installed: its rows are missing.")
    return Report("jax-step", device(), versions(), rows, notes)


def device() -> str:
    """Where JAX runs by default, e.g. "cpu: Xeon ..." or "cuda:0: NVIDIA ..."."""
    default = jax.devices()[0]
    name = next(name for name, known in devices_by_name().items() if known == default)
    return f"{name}: {cpu_name() if name == 'cpu' else default.device_kind}"


def _of_rule(rule: str, rounds: int, tell: Tell) -> Report:
    rows: list[Row] = []
    for size in (128, 16):
        tell(f"jax-step: batches of {size}, {rounds} rounds of {rule} beside Dynamic")
        found = in_fresh_python("-m", "polyamp_jax._bench", str(size), str(rounds), rule)
        rows += [Row(**row) for row in found]
        made = ways(rule)
        used = {name: temporary(made[name].compiled(size)) for name in (rule, "Dynamic")}
        beyond = used[rule] - used["Dynamic"]
        rows.append(Row(f"batch {size}, temporaries", beyond, "MiB", 0.0, RULE_LIMITS["MiB"]))
    return Report(
        f"jax-step --rule {rule}",
        f"{jax.default_backend()}: {cpu_name()}",
        versions(),
        rows,
        [
            "one training step of an MLP of 1.9M parameters under optax.adamw, float32, donated"
            f" buffers, with polyamp's loss scaler under {rule} and under Dynamic, its peer.",
            "ratio: median paired time over Dynamic's, divided by that of a second Dynamic, which"
            " is the peer; low and high: its 95 % interval.",
        ],
    )


def _rule_rows(rule: str, size: int, rounds: int) -> list[Row]:
    times = interleaved({name: timed(way, size) for name, way in ways(rule).items()}, rounds)
    ours, peer, again = times[rule], times["Dynamic"], times["Dynamic again"]
    found, own, label = corrected_ratio(ours, peer, again), ratio(again, peer), f"batch {size}"
    milli = [1e3 * statistics.median(seconds) for seconds in (ours, peer)]
    return [
        Row(f"{label}, time", milli[0], "ms", milli[1]),
        Row(f"{label}, ratio", found.value, "ratio", own.value, RULE_LIMITS["ratio"]),
        Row(f"{label}, ratio, low", found.low, "ratio", own.low),
        Row(f"{label}, ratio, high", found.high, "ratio", own.high),
        Row(f"{label}, ratio over the plain step", ratio(ours, times["plain"]).value, "ratio"),
    ]


def versions() -> dict[str, str]:
    """Of everything the numbers depend on."""
    found = {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "optax": optax.__version__,
        "flax": flax.__version__,
        "polyamp": polyamp.__version__,
    }
    if importlib.util.find_spec("jmp") is not None:
        from importlib.metadata import version

        found["jmp"] = version("jmp")
    return found


def exact_rows() -> list[Row]:
    """Memory and compilations: the same on every run."""
    made = ways()
    rows = []
    for size in (128, 16):
        used = {name: temporary(way.compiled(size)) for name, way in made.items()}
        beyond = {name: used[name] - used["plain"] for name in made}
        peer = min(beyond[name] for name in PEERS if name in made)
        label = f"batch {size}, temporaries"
        rows.append(Row(label, beyond["polyamp"], "MiB", peer, MEMORY_LIMIT))
    count = compilations(made["polyamp"])
    return [*rows, Row("compilations", count, "count", compilations(made["flax"]), 1)]


def time_rows(size: int, rounds: int) -> list[Row]:
    """Milliseconds and ratios of every way at one batch size."""
    times = interleaved({name: timed(way, size) for name, way in ways().items()}, rounds)
    plain = times.pop("plain")
    found = {name: ratio(seconds, plain) for name, seconds in times.items()}
    peers = {name: found[name] for name in PEERS if name in found}
    best = min(estimate.value for estimate in peers.values())
    ours, label = found["polyamp"], f"batch {size}"
    milli = [1e3 * statistics.median(seconds) for seconds in (times["polyamp"], plain)]
    large = size == 128
    rows = [
        Row(f"{label}, time and plain step's", milli[0], "ms", milli[1]),
        Row(f"{label}, ratio", ours.value, "ratio", best, RATIO_LIMIT if large else None),
        Row(f"{label}, ratio, low", ours.low, "ratio"),
        Row(f"{label}, ratio, high", ours.high, "ratio"),
        *(Row(f"{label}, ratio of {name}", peer.value, "ratio") for name, peer in peers.items()),
    ]
    if not large:
        limit = SHARE_LIMIT * (best - 1.0)
        rows.append(Row(f"{label}, overhead", ours.value - 1.0, "ratio", best - 1.0, limit))
    return rows


def _main(size: str, rounds: str, rule: str = "") -> None:
    keys = ("name", "value", "unit", "peer", "limit")
    rows = _rule_rows(rule, int(size), int(rounds)) if rule else time_rows(int(size), int(rounds))
    print(json.dumps([{key: getattr(row, key) for key in keys} for row in rows]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
