"""Shapes of real models' parameters, for benches in every framework."""

from __future__ import annotations

_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # width, bottleneck blocks
_EXPANSION = 4
_CLASSES = 1000

Shape = tuple[int, ...]


def resnet50_shapes() -> list[Shape]:
    """Parameter shapes of ResNet-50 (He et al., 2015, arXiv:1512.03385, table 1), in order.

    161 tensors, 25,557,032 numbers: a 7x7 stem, 16 bottleneck blocks of 1x1, 3x3 and 1x1
    convolutions with a projection at the head of each stage, a linear layer of 1,000 classes; each
    convolution (out, in, height, width) is followed by a batch norm's weight and bias.
    """
    shapes = _convolution(3, 64, 7)
    channels = 64
    for width, blocks in _STAGES:
        wide = width * _EXPANSION
        for block in range(blocks):
            shapes += _convolution(channels, width, 1)
            shapes += _convolution(width, width, 3)
            shapes += _convolution(width, wide, 1)
            if block == 0:
                shapes += _convolution(channels, wide, 1)
            channels = wide
    return [*shapes, (_CLASSES, channels), (_CLASSES,)]


def _convolution(channels: int, out: int, size: int) -> list[Shape]:
    return [(out, channels, size, size), (out,), (out,)]
