"""What a device can compute in, and what is faster there than float32."""

from __future__ import annotations

import functools
import time

import torch

from polyamp._errors import BackendError
from polyamp._selection import BRAIN, HALF, Capabilities
from polyamp_torch._ops import devices

SIZE, ROUNDS = 512, 7
"""Of the matrix product that is timed."""


def capabilities(device: str | torch.device | None = None) -> Capabilities:
    """The low formats of a device, and which of them take longer than float32 there.

    One product of two 512 x 512 matrices is timed in each format, side by side, medians of seven;
    asked again the answer is remembered.

    Args:
        device: a device of torch; None: "cuda" where there is one, else "cpu".

    Returns:
        `polyamp.Capabilities`. A format is slow where its median is above float32's.

    Raises:
        BackendError: no such device.
    """
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else str(device)
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for a device
        raise BackendError(f"no device {name!r}; torch has {', '.join(devices())}") from error
    return _measured(name)


@functools.cache
def _measured(device: str) -> Capabilities:
    formats = {"float32": torch.float32, HALF: torch.float16, BRAIN: torch.bfloat16}
    inputs = {}
    for name, dtype in formats.items():
        try:
            matrix = torch.ones(SIZE, SIZE, device=device, dtype=dtype)
            matrix @ matrix
            inputs[name] = matrix
        except RuntimeError:  # no kernel for this format
            continue
    times: dict[str, list[float]] = {name: [] for name in inputs}
    for _ in range(ROUNDS):
        for name, matrix in inputs.items():
            times[name].append(_seconds(matrix))
    return Capabilities.from_times(times)


def _seconds(matrix: torch.Tensor) -> float:
    _wait(matrix.device)
    start = time.perf_counter()
    matrix @ matrix
    _wait(matrix.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
