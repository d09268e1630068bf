"""What a device can compute in, and what is faster there than float32."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp

from polyamp._errors import BackendError
from polyamp._selection import BRAIN, HALF, Capabilities
from polyamp_jax._ops import devices_by_name

SIZE, ROUNDS = 512, 7
"""Of the matrix product that is timed."""


def capabilities(device: str | jax.Device | None = None) -> Capabilities:
    """The low formats of a device, and which of them take longer than float32 there.

    One product of two 512 x 512 matrices is timed in each format, side by side, medians of seven;
    asked again the answer is remembered.

    Args:
        device: of JAX, or a name of `polyamp.backend("jax").devices()`; None: JAX's default.

    Returns:
        `polyamp.Capabilities`. A format is slow where its median is above float32's.

    Raises:
        BackendError: no such device.
    """
    known = devices_by_name()
    if isinstance(device, str) and device not in known:
        raise BackendError(f"no device {device!r}; JAX has {', '.join(known)}")
    return _measured(known[device] if isinstance(device, str) else device or jax.devices()[0])


@functools.cache
def _measured(device: jax.Device) -> Capabilities:
    product: Any = jax.jit(jnp.matmul)
    inputs = {}
    for name in (HALF, BRAIN, "float32"):
        matrix = jax.device_put(jnp.ones((SIZE, SIZE), name), device)
        try:
            jax.block_until_ready(product(matrix, matrix))
        except jax.errors.JaxRuntimeError:  # no kernel for this format
            continue
        inputs[name] = matrix
    times: dict[str, list[float]] = {name: [] for name in inputs}
    for _ in range(ROUNDS):
        for name, matrix in inputs.items():
            start = time.perf_counter()
            jax.block_until_ready(product(matrix, matrix))
            times[name].append(time.perf_counter() - start)
    return Capabilities.from_times(times)
