"""A float32 text tower beside a float16 image tower, trained contrastively: policies by rule, or
found by measuring.

    python examples/torch_two_towers.py [STEPS]                # by hand
    python examples/torch_two_towers.py [STEPS] calibrate      # by amp.calibrate

Pairs are digits: the image of one, and its name as a row of letters. The text tower's embedding is
made large, so that its values leave float16's range.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import polyamp
import polyamp.torch as amp

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
RULES = polyamp.PolicyMap(
    {"text": "float32", "image.norm": "float32", "image": "fp16"}, default="float32"
)


class Towers(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.text = nn.Sequential(
            nn.EmbeddingBag(27, width, padding_idx=0), nn.Linear(width, width)
        )
        with torch.no_grad():
            self.text[0].weight.mul_(1e5)
        self.image = nn.Sequential()
        self.image.add_module("first", nn.Linear(64, 2 * width))
        self.image.add_module("norm", nn.LayerNorm(2 * width))
        self.image.add_module("act", nn.GELU())
        self.image.add_module("last", nn.Linear(2 * width, width))

    def forward(self, images: Tensor, letters: Tensor) -> Tensor:
        a, b = F.normalize(self.image(images), dim=-1), F.normalize(self.text(letters), dim=-1)
        return a @ b.T * 10.0  # (images, names)


def letters() -> Tensor:
    rows = [[ord(c) - 96 for c in name.ljust(5, "`")] for name in NAMES]
    return torch.tensor(rows)


def main(steps: int = 300, way: str = "by hand") -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.data / 16.0).float()
    labels = torch.from_numpy(digits.target)
    torch.manual_seed(0)
    model, names = Towers(), letters()
    rules = RULES
    if way == "calibrate":
        batches = [(images[i::300], names, labels[i::300]) for i in range(4)]
        both = polyamp.Capabilities()  # whatever is fast here
        rules = amp.calibrate(model, batches, F.cross_entropy, capabilities=both)
        print(rules.to_toml())
    amp.apply_policy(model, rules)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = amp.GradScaler("cpu", init_scale=2.0**12)
    for _ in range(steps):
        part = torch.randint(0, 1500, (64,))
        loss = F.cross_entropy(model(images[part], names), labels[part])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.clip_and_step(optimizer, max_norm=1.0)
        scaler.update()
    amp.describe(model)
    with torch.no_grad():
        right = model(images[1500:], names).argmax(1) == labels[1500:]
    print(f"{100 * right.float().mean():.1f} % of the held-out images find their name")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
