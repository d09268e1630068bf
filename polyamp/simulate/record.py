"""Record gradient traces from real float32 trainings in PyTorch.

    python -m polyamp.simulate.record cnn_clean out.npz --steps 6000

    cnn_clean     a small CNN on handwritten digits
    cnn_outlier   the same; one batch in a hundred is multiplied by 10 to 1000
    ae_tiny       an autoencoder of the digits, loss x 1e-5
    tf_spike      a character transformer; twice the learning rate is x 20 for 10 steps
    deep_vanish   sixteen sigmoid layers on the digits

In every step, after the backward pass: the largest |gradient| of parameters and of activations
(the outputs of modules without children), histograms of log2 |g| of the nonzero entries, the loss.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyamp._errors import PolyampError
from polyamp.simulate.compact import LOW, OCTAVES, PER_OCTAVE, compact
from polyamp.simulate.read import SHIPPED

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

BATCH = 32
CONTEXT = 32
OUTLIERS = 0.01
SPIKE, SPIKE_STEPS = 20.0, 10


@dataclass(frozen=True)
class Training:
    """What is trained.

    Attributes:
        model: float32, in training mode.
        loss: step number -> the loss of that step's batch, a scalar.
        learning_rate: step number -> learning rate of Adam.
    """

    model: torch.nn.Module
    loss: Callable[[int], torch.Tensor]
    learning_rate: Callable[[int], float]


def record(name: str, steps: int, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Train and measure.

    Args:
        name: one of the trainings above.
        steps: optimizer steps, 1 or more.
        seed: of weights and batches.

    Returns:
        AP, AA, LS float32 (steps,); HP, HA int32 (steps, 560), bins of a quarter octave from
        2**-100: the full form that `read_npz` reads.

    Raises:
        PolyampError: an unknown name, no steps, or torch or scikit-learn is missing.
    """
    if name not in SHIPPED:
        raise PolyampError(f"no training {name!r}: choose from {', '.join(SHIPPED)}")
    if steps < 1:
        raise PolyampError(f"a recording needs 1 step or more, got {steps}")
    try:
        import torch
    except ImportError as error:
        raise PolyampError('recording needs torch: pip install "polyamp[torch]"') from error
    import numpy as np

    torch.manual_seed(seed)
    training = _training(name, steps, np.random.default_rng(seed))
    optimizer = torch.optim.Adam(training.model.parameters())
    inner: list[torch.Tensor] = []
    _watch(training.model, inner)
    rows = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = training.learning_rate(step)
        optimizer.zero_grad()
        inner.clear()
        loss = training.loss(step)
        loss.backward()  # type: ignore[no-untyped-call]
        grads = [p.grad for p in training.model.parameters() if p.grad is not None]
        rows.append((*_measured(grads), *_measured(inner), loss.item()))
        optimizer.step()
    ap, hp, aa, ha, ls = (np.array(column) for column in zip(*rows, strict=True))
    plain = {key: value.astype(np.float32) for key, value in (("AP", ap), ("AA", aa), ("LS", ls))}
    return {**plain, "HP": hp.astype(np.int32), "HA": ha.astype(np.int32)}


def _watch(model: torch.nn.Module, into: list[torch.Tensor]) -> None:
    """Collect the gradients of what modules without children put out."""

    def forward(module: Any, inputs: Any, output: Any) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: into.append(grad))

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(forward)


def _measured(grads: Sequence[torch.Tensor]) -> tuple[float, npt.NDArray[Any]]:
    import torch

    sizes = torch.cat([grad.detach().abs().flatten() for grad in grads])
    bins = OCTAVES * PER_OCTAVE
    places = ((sizes[sizes > 0].log2() - LOW) * PER_OCTAVE).floor().clamp(0, bins - 1)
    counts = torch.bincount(places.to(torch.int64), minlength=bins)
    return float(sizes.max()), counts.numpy()


def _training(name: str, steps: int, rng: Any) -> Training:
    from polyamp.demo.data import load

    if name == "tf_spike":
        return _transformer(load("text", CONTEXT), steps, rng)
    task = load("digits")
    if name == "ae_tiny":
        return _autoencoder(task, rng)
    if name == "deep_vanish":
        return _sigmoid(task, rng)
    return _cnn(task, rng, OUTLIERS if name == "cnn_outlier" else 0.0)


def _batch(task: Any, rng: Any) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    picked = rng.integers(0, len(task.inputs), BATCH)
    return torch.from_numpy(task.inputs[picked]), torch.from_numpy(task.targets[picked])


def _cnn(task: Any, rng: Any, outliers: float) -> Training:
    from torch import nn
    from torch.nn import functional

    model = nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(512, 28), nn.ReLU(), nn.Linear(28, task.classes),
    )  # fmt: skip

    def loss(step: int) -> torch.Tensor:
        inputs, targets = _batch(task, rng)
        if rng.random() < outliers:
            inputs = inputs * float(10.0 ** rng.uniform(1, 3))
        return functional.cross_entropy(model(inputs), targets)

    return Training(model, loss, lambda step: 1e-3)


def _autoencoder(task: Any, rng: Any) -> Training:
    from torch import nn
    from torch.nn import functional

    model = nn.Sequential(
        nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 16), nn.Tanh(), nn.Linear(16, 96), nn.Tanh(),
        nn.Linear(96, 64),
    )  # fmt: skip

    def loss(step: int) -> torch.Tensor:
        inputs = _batch(task, rng)[0].flatten(1)
        return functional.mse_loss(model(inputs), inputs) * 1e-5

    return Training(model, loss, lambda step: 1e-3)


def _sigmoid(task: Any, rng: Any) -> Training:
    from torch import nn
    from torch.nn import functional

    widths = [64] * 16
    layers = [layer for width in widths for layer in (nn.Linear(width, width), nn.Sigmoid())]
    model = nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-1], task.classes))

    def loss(step: int) -> torch.Tensor:
        inputs, targets = _batch(task, rng)
        return functional.cross_entropy(model(inputs), targets)

    return Training(model, loss, lambda step: 1e-3)


def _transformer(task: Any, steps: int, rng: Any) -> Training:
    import torch
    from torch import nn
    from torch.nn import functional

    width = 48
    embed, place = nn.Embedding(task.classes, width), nn.Embedding(CONTEXT, width)
    layers = nn.ModuleList(
        nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        for _ in range(2)
    )
    out = nn.Linear(width, task.classes)
    mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)

    def loss(step: int) -> torch.Tensor:
        inputs, targets = _batch(task, rng)
        hidden = embed(inputs) + place(torch.arange(CONTEXT))
        for layer in layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return functional.cross_entropy(out(hidden).flatten(0, 1), targets.flatten())

    def learning_rate(step: int) -> float:
        spiked = any(0 <= step - start < SPIKE_STEPS for start in (steps // 3, 2 * steps // 3))
        return 1e-3 * (SPIKE if spiked else 1.0)

    return Training(nn.ModuleList([embed, place, layers, out]), loss, learning_rate)


def main(arguments: Sequence[str] | None = None) -> int:
    """Record one trace into a file. Returns the exit status: 0 fine, 2 a user's error."""
    import numpy as np

    parser = argparse.ArgumentParser(prog="python -m polyamp.simulate.record")
    parser.add_argument("name", metavar="NAME", help=", ".join(SHIPPED))
    parser.add_argument("out", metavar="OUT", help="an .npz file")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--full", action="store_true", help="quarter-octave counts, 10 x as large")
    args = parser.parse_args(arguments)
    try:
        if Path(args.out).suffix != ".npz" or not Path(args.out).absolute().parent.is_dir():
            raise PolyampError(f"{args.out} must end in .npz, in a folder that exists")
        full = record(args.name, args.steps, args.seed)
    except PolyampError as error:
        print(f"record: {error}", file=sys.stderr)
        return 2
    np.savez_compressed(args.out, **(full if args.full else compact(full)))  # type: ignore[arg-type]
    return 0


if __name__ == "__main__":
    sys.exit(main())
