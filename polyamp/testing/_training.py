"""A small training whose gradients overflow by its data, and what must come of it.

    out  = relu(x @ W1) @ W2                 two weights
    out  = W                                 one weight, an array of any shape
    loss = sum(out * target) + sum(sqrt(out * root + shift))

`out` is computed in `dtype`, the loss in float32. A clean batch has root 0 and shift 1. Where both
are 0 the loss is finite and its derivative, 0 * inf, is NaN. Where the target is not finite neither
is the loss. Inputs and weights are diagonal: every sum has one term that is not 0, so float32
rounds once a product, and every framework must give the same bits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from polyamp._scaling import Rule, bind
from polyamp._state import ScalerState, Signal
from polyamp.testing._traces import Difference, first_difference, stacked

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

Optimizer = Literal["sgd", "momentum", "adam"]
MOMENTUM = 0.5
"""Of the optimizer "momentum": SGD without dampening or Nesterov."""
SIZE = 4


class Batch(NamedTuple):
    """One batch, numpy float32."""

    x: Array
    """[samples, inputs]; of no use with one weight."""
    target: Array
    """Shape of `out`."""
    root: Array
    """Shape of `out`."""
    shift: Array
    """Shape of `out`."""


class Training(NamedTuple):
    """What `Backend.toy_train` is to do."""

    rule: Rule
    """The scaler's rule."""
    weights: Sequence[Array]
    """float32: W1 [inputs, hidden] and W2 [hidden, outputs], or one array. Not to be changed."""
    batches: Sequence[Batch]
    """One a step."""
    state: ScalerState | None = None
    """The scaler's state to go on from, in Python numbers; None: fresh."""
    optimizer: Optimizer = "sgd"
    """"momentum" has `MOMENTUM`; "adam" the framework's defaults but for the rate."""
    learning_rate: float = 1.0
    dtype: str = "float32"
    """Of the computation up to `out`; weights stay float32."""
    device: str = "cpu"
    mode: str = "eager"
    """One of the backend's modes("training")."""


Row = tuple[Sequence[Any], ScalerState]
"""Weights (numpy) and state (Python numbers) after a step."""


def array_batch(target: Any, bad: int | None = None) -> Batch:
    """A batch for one weight: its gradient is `target`, but NaN at flat index `bad`."""
    import numpy as np

    target = np.asarray(target, np.float32)
    shift = np.ones_like(target)
    if bad is not None:
        shift.flat[bad] = 0.0
    return Batch(np.zeros((), np.float32), target, np.zeros_like(target), shift)


def kinds_for(rule: Rule, steps: int, seed: int = 0) -> list[str]:
    """What each batch is to be: "clean", "overflow" (of the gradient alone) or "lost" (the loss).

    Begins with a clean one; leaves out what would make the rule give up.
    """
    dice, step, state = random.Random(seed), bind(rule), rule.init()
    kinds: list[str] = []
    while len(kinds) < steps:
        run = ["clean"] * dice.choice([1, 2, 4, 5]) + dice.choice(_BURSTS)
        for kind in run:
            new = step(state, Signal(kind == "clean", amax=state.loss_scale))
            if new.fault:
                kind, new = "clean", step(state, Signal(True, amax=state.loss_scale))
            kinds.append(kind)
            state = new
    return kinds[:steps]


_BURSTS = [["overflow"], ["lost"], ["overflow", "overflow"], ["lost", "overflow", "overflow"]]


def network(rule: Rule, kinds: Sequence[str], seed: int = 0, **more: Any) -> Training:
    """The training of the two-layer network on batches of these kinds.

    Gradients are about 16 / rule.init_scale, so that float16 holds them scaled.
    """
    dice = random.Random(seed)
    size = 16.0 / rule.init_scale
    exact = rule.wants_amax and more.get("dtype", "float32") != "float32"
    weights = [_diagonal([1.0, 2.0, 1.0, 0.5]), _diagonal([1.0, -1.0, 0.5, 2.0])]
    batches = [_batch(kind, size, dice) for kind in kinds]
    rate = 0.0 if exact else 1.0 / (16.0 * size)
    return Training(rule, weights, batches, **{"learning_rate": rate, **more})


def _diagonal(values: Sequence[float]) -> Array:
    import numpy as np

    return np.diag(np.asarray(values, np.float32))


def _batch(kind: str, size: float, dice: random.Random) -> Batch:
    import numpy as np

    def row(values: Sequence[float]) -> Array:
        return _diagonal([dice.choice(values) for _ in range(SIZE)])

    x, target = row([0.5, 1.0]), row([-size, size, size / 2, size / 4])
    shift = np.ones((SIZE, SIZE), np.float32)
    place = dice.randrange(SIZE)
    if kind == "overflow":
        shift[place, place] = 0.0
    if kind == "lost":
        target[place, place] = dice.choice([math.inf, -math.inf, math.nan])
    return Batch(x, target, np.zeros_like(shift), shift)


def gradients(
    weights: Sequence[Any], batch: Batch, scale: float, dtype: str = "float32"
) -> tuple[Any, list[Any]]:
    """The loss, and the gradients of `scale` times it, in numpy float32.

    With the network in a narrower `dtype` each product of the backward pass is rounded to it; the
    weights and inputs must be numbers that it holds.
    """
    import ml_dtypes
    import numpy as np

    narrow = {"bfloat16": ml_dtypes.bfloat16}.get(dtype) or np.dtype(dtype)

    def rounded(values: Any) -> Any:
        return values.astype(narrow).astype(np.float32)

    x, target, root, shift = batch
    with np.errstate(all="ignore"):
        one = len(weights) == 1
        hidden = None if one else np.maximum(x @ weights[0], np.float32(0))
        out = weights[0] if one else hidden @ weights[1]
        depth = np.sqrt(out * root + shift)
        loss = np.sum(out * target) + np.sum(depth)
        seed = np.float32(scale)
        slope = rounded(seed * target + seed / (np.float32(2) * depth) * root)
        if hidden is None:
            return loss, [slope]
        inner = rounded(np.where(hidden > 0, slope @ weights[1].T, np.float32(0)))
        return loss, [rounded(x.T @ inner), rounded(hidden.T @ slope)]


def reference(training: Training, sees_loss: bool) -> list[Row]:
    """What must come of a training under "sgd" or "momentum", in float32.

    Args:
        training: device, mode and dtype do not matter.
        sees_loss: whether the backend tells its rule that a loss is not finite.
    """
    import numpy as np

    rule, rate = training.rule, np.float32(training.learning_rate)
    step = bind(rule)
    state = rule.init() if training.state is None else training.state
    weights = [np.array(w, np.float32) for w in training.weights]
    moments = [np.zeros_like(w) for w in weights]
    decay = np.float32(MOMENTUM if training.optimizer == "momentum" else 0.0)
    rows: list[Row] = []
    for batch in training.batches:
        loss, grads = gradients(weights, batch, state.loss_scale, training.dtype)
        signal, true = _measured(grads, state.loss_scale)
        seen = bool(np.isfinite(loss)) or not sees_loss
        signal = Signal(signal.finite, seen, signal.amax if rule.wants_amax else None)
        state = step(state, signal)
        if state.skipped_in_a_row == 0:
            moments = [decay * m + g for m, g in zip(moments, true, strict=True)]
            weights = [w - rate * m for w, m in zip(weights, moments, strict=True)]
        rows.append((weights, state))
    return rows


def _measured(grads: Sequence[Any], scale: float) -> tuple[Signal, list[Any]]:
    import numpy as np

    with np.errstate(all="ignore"):
        true = [g * np.float32(1.0 / scale) for g in grads]
    finite = all(np.isfinite(g).all() for g in (*grads, *true))
    amax = max(float(np.abs(g).max()) for g in grads) if finite else math.inf
    return Signal(finite, amax=amax), true


def training_difference(got: Sequence[Row], training: Training) -> Difference | None:
    """The first step at which a training is not what it must be; None if there is none.

    States are compared bit for bit; so are weights where float32 arithmetic leaves no choice
    (powers of two as scales). Else: a skipped step leaves them as they were, bit for bit, and an
    applied one with a learning rate changes them and leaves them finite.
    """
    states = stacked([state for _, state in got])
    results = []
    for sees_loss in (True, False):
        want = reference(training, sees_loss)
        different = first_difference(states, [state for _, state in want])
        results.append((math.inf if different is None else different.step, different, want))
    _, different, want = max(results, key=lambda result: result[0])
    return different or _first_wrong_weights(got, want, training)


def _first_wrong_weights(
    got: Sequence[Row], want: Sequence[Row], training: Training
) -> Difference | None:
    scales = [training.rule.init_scale, *(state.loss_scale for _, state in want)]
    exact = training.dtype == "float32" and training.optimizer != "adam"
    exact = exact and all(math.frexp(scale)[0] == 0.5 for scale in scales)
    before: Sequence[Any] = training.weights
    for number, ((found, _), (right, state)) in enumerate(zip(got, want, strict=True), start=1):
        skipped = state.skipped_in_a_row > 0
        wrong = weights_difference(found, right, number) if exact else None
        if skipped and wrong is None:
            wrong = weights_difference(found, before, number)
        if wrong:
            return wrong
        if not skipped and training.learning_rate and _equal(found, before):
            return Difference(number, "weights", "changed (applied)", "unchanged")
        if not _finite(found):
            return Difference(number, "weights", "finite", _shown(found))
        before = found
    return None


def weights_difference(got: Sequence[Any], want: Sequence[Any], step: int) -> Difference | None:
    """The difference between two lists of weights after a step, bit for bit."""
    return None if _equal(got, want) else Difference(step, "weights", _shown(want), _shown(got))


def _equal(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True))


def _shown(weights: Sequence[Any]) -> str:
    import numpy as np

    values = np.concatenate([np.asarray(w)[np.asarray(w) != 0].ravel() for w in weights])
    return f"{values[:8].tolist()}"


def _finite(weights: Sequence[Any]) -> bool:
    import numpy as np

    return all(bool(np.isfinite(w).all()) for w in weights)
