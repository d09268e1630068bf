"""The demo's two models, written as anyone would: nothing in them knows about precision."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyamp.demo import Settings, Task


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch normalisation, and a way round them."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, h, w) -> (n, out, h / stride, w / stride)."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Three stages of `depth` residual blocks, of 1, 2 and 4 times `width` channels."""

    def __init__(self, classes: int, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        blocks: list[nn.Module] = []
        channels = width
        for out in (width, 2 * width, 4 * width):
            for _ in range(depth):
                blocks.append(ResidualBlock(channels, out, 1 if channels == out else 2))
                channels = out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(n, 8, 8) -> logits (n, classes)."""
        x = F.relu(self.norm(self.stem(images.unsqueeze(1))))
        pooled: Tensor = self.blocks(x).mean(dim=(2, 3))
        logits: Tensor = self.head(pooled)
        return logits


class Layer(nn.Module):
    """Causal self-attention and a two-layer perceptron, each after a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, width) -> (n, t, width)."""
        n, t, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(n, t, width))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Transformer(nn.Module):
    """Decoder-only, learned positions that start as sinusoids (Vaswani et al. 2017)."""

    def __init__(self, symbols: int, context: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        nn.init.normal_(self.symbols.weight, std=0.1)
        self.positions = nn.Parameter(0.1 * sinusoids(context, width))
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols)

    def forward(self, text: Tensor) -> Tensor:
        """int64 (n, context) -> logits (n, context, symbols)."""
        x = self.symbols(text) + self.positions
        logits: Tensor = self.head(self.norm(self.layers(x)))
        return logits


def sinusoids(length: int, width: int) -> Tensor:
    """(length, width): sine and cosine of the position at width / 2 frequencies, 1 to 1/100."""
    frequency = torch.logspace(0, -2, width // 2)
    angle = torch.arange(length).unsqueeze(1) * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1)


def build(task: Task, settings: Settings) -> nn.Module:
    """The model for `task`, on the CPU, float32, its weights given by `settings.seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        if task.name == "digits":
            return ResNet(task.classes, settings.width, settings.depth)
        context = task.inputs.shape[1]
        return Transformer(task.classes, context, settings.width, settings.depth, settings.heads)
