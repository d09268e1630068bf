"""Six small trainings made to be hard in float16, on the demo's digits; sound in float32.

sigmoid     sixteen sigmoid layers: gradients shrink from the last layer to the first
t5-ff       six gated feed-forward blocks between RMS norms; the last one's output is 5e6
outliers    a CNN; one batch in a hundred is multiplied by 1000
tiny-loss   a perceptron whose loss is multiplied by 1e-8
rnn         a ReLU recurrence over 32 steps whose state grows past 1e5, without clipping
attention   attention with a key bias, whose true gradient is 0
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyamp.demo.data import load

BATCH = 64
SIDE = 8


@dataclass(frozen=True, eq=False)
class Hard:
    """One training.

    Attributes:
        model: float32.
        inputs, targets: all samples, float32 (n, 8, 8) and int64 (n,).
        weight: of the loss.
        outliers: share of the batches that are multiplied by 1000.
        learning_rate: of Adam, whose epsilon is 1e-30; decays to a fiftieth.
        max_norm: gradients are clipped to it; None: not at all.
    """

    name: str
    model: nn.Module
    inputs: Tensor
    targets: Tensor
    weight: float = 1.0
    outliers: float = 0.0
    learning_rate: float = 2e-3
    max_norm: float | None = None

    def batches(self, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The same batches every time."""
        source = torch.Generator().manual_seed(1)
        for _ in range(steps):
            chosen = torch.randint(0, len(self.inputs), (BATCH,), generator=source)
            far = float(torch.rand((), generator=source)) < self.outliers
            inputs = self.inputs[chosen]
            yield (inputs * 1000.0 if far else inputs), self.targets[chosen]

    def optimizer(self, steps: int) -> tuple[torch.optim.Optimizer, Any]:
        """Adam, for which the loss' weight does not count, and a linear decay over `steps`."""
        adam = torch.optim.Adam(self.model.parameters(), self.learning_rate, eps=1e-30)
        return adam, torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.02, steps)

    @torch.no_grad()
    def accuracy(self) -> float:
        """Share of all samples that the model gets right."""
        self.model.eval()
        right: float = (self.model(self.inputs).argmax(1) == self.targets).float().mean().item()
        self.model.train()
        return right


class GatedBlock(nn.Module):
    """Residual gated feed-forward of T5 1.1: x + wo(gelu(w0 n) * w1 n), n = norm(x)."""

    def __init__(self, width: int, inner: int, gain: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.w0 = nn.Linear(width, inner, bias=False)
        self.w1 = nn.Linear(width, inner, bias=False)
        self.wo = nn.Linear(inner, width, bias=False)
        with torch.no_grad():
            self.wo.weight.mul_(gain)

    def forward(self, x: Tensor) -> Tensor:
        """(n, width) -> (n, width)."""
        normed = self.norm(x)
        out: Tensor = x + self.wo(F.gelu(self.w0(normed)) * self.w1(normed))
        return out


class Recurrence(nn.Module):
    """h = relu(W h + U x) over the pixels, two at a time; W makes h `growth` times as large."""

    def __init__(self, width: int, classes: int, growth: float = 1.1, enter: float = 1e4) -> None:
        super().__init__()
        self.recurrent = nn.Linear(width, width)
        self.enter = nn.Linear(2, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, classes))
        nn.init.orthogonal_(self.recurrent.weight, gain=growth * 2.0**0.5)
        with torch.no_grad():
            self.enter.weight.mul_(enter)

    def forward(self, images: Tensor) -> Tensor:
        """(n, 8, 8) -> logits (n, classes)."""
        pieces = images.reshape(len(images), -1, 2)
        state = torch.zeros(len(images), self.recurrent.in_features, device=images.device)
        for step in range(pieces.shape[1]):
            state = F.relu(self.recurrent(state) + self.enter(pieces[:, step]))
        out: Tensor = self.head(self.norm(state))
        return out


class Attention(nn.Module):
    """The image's rows attend to each other; queries, keys and values have biases."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.enter = nn.Linear(SIDE, width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.key_bias = KeyBias(width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width * SIDE, classes)

    def forward(self, rows: Tensor) -> Tensor:
        """(n, 8, 8) -> logits (n, classes)."""
        x = self.enter(rows)
        keys = self.key_bias(self.key(x))
        attended = F.scaled_dot_product_attention(self.query(x), keys, self.value(x))
        out: Tensor = self.head(self.norm(x + attended).flatten(1))
        return out


class KeyBias(nn.Module):
    """A bias of its own, as some models keep it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """x + bias."""
        return x + self.bias


def _cnn(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, SIDE)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(512, 28), nn.ReLU(), nn.Linear(28, classes),
    )  # fmt: skip


def _sigmoid(classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(16):
        linear = nn.Linear(64, 64)
        nn.init.orthogonal_(linear.weight, gain=6.0)
        layers += [linear, nn.Sigmoid()]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, classes))


def _t5(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64),
        *(GatedBlock(64, 128, gain) for gain in (1, 1, 1, 1, 1, 1e7)),
        nn.RMSNorm(64), nn.Linear(64, classes),
    )  # fmt: skip


def _perceptron(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(),
        nn.Linear(64, classes),
    )  # fmt: skip


_MODELS: dict[str, tuple[Any, dict[str, float]]] = {
    "sigmoid": (_sigmoid, {}),
    "t5-ff": (_t5, {}),
    "outliers": (_cnn, {"outliers": 0.01, "max_norm": 1.0}),
    "tiny-loss": (_perceptron, {"weight": 1e-8}),
    "rnn": (lambda classes: Recurrence(64, classes), {}),
    "attention": (lambda classes: Attention(32, classes), {}),
}
NAMES = tuple(_MODELS)
"""The trainings, in the order of the module's docstring."""


def hard(name: str, seed: int = 0) -> Hard:
    """The training called `name`; `seed` gives the weights."""
    task = load("digits")
    build, settings = _MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(task.classes)
    inputs, targets = torch.from_numpy(task.inputs), torch.from_numpy(task.targets)
    return Hard(name, model, inputs, targets, **settings)
