"""What a device can compute in, and what is faster there than float32."""

from __future__ import annotations

import functools
import time
from typing import Any

import keras
from keras import ops

from polyamp._errors import BackendError
from polyamp._selection import BRAIN, HALF, Capabilities
from polyamp_keras._ops import FRAMEWORK, compiled, devices, number

SIZE, ROUNDS = 512, 7
"""Of the matrix product that is timed."""


def capabilities(device: str | None = None) -> Capabilities:
    """The low formats of a device, and which of them take longer than float32 there.

    One product of two 512 x 512 matrices is timed in each format, side by side, medians of seven;
    asked again the answer is remembered.

    Args:
        device: a name of `polyamp.backend("keras").devices()`; None: the first that is no CPU,
            else the CPU.

    Returns:
        `polyamp.Capabilities`, without powers of two of layers, which Keras has not. A format is
        slow where its median is above float32's.

    Raises:
        BackendError: no such device.
    """
    known = devices()
    if device is not None and device not in known:
        raise BackendError(f"no device {device!r}; Keras has {', '.join(known)}")
    return _measured(known[-1 if len(known) == 1 else 1] if device is None else device)


@functools.cache
def _measured(device: str) -> Capabilities:
    product = ops.matmul if FRAMEWORK == "torch" else compiled(ops.matmul)
    inputs = {}
    with keras.device(device):
        for name in (HALF, BRAIN, "float32"):
            matrix = ops.ones((SIZE, SIZE), name)
            try:
                _wait(product(matrix, matrix))
            except Exception as error:  # each framework has its own for "no kernel"
                if name == "float32":
                    raise BackendError(f"{device} multiplies no float32 matrices") from error
                continue
            inputs[name] = matrix
        times: dict[str, list[float]] = {name: [] for name in inputs}
        for _ in range(ROUNDS):
            for name, matrix in inputs.items():
                start = time.perf_counter()
                _wait(product(matrix, matrix))
                times[name].append(time.perf_counter() - start)
    return Capabilities.from_times(times, shifts=False)


def _wait(result: Any) -> None:
    number(ops.cast(result[0, 0], "float32"))
