"""Fixtures of the backends' tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest


@pytest.fixture(params=["host", "device"])
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Makes a GradScaler that decides on the host, and one that decides on the device."""
    from torch_scaler_cases import make_scaler

    return partial(make_scaler, request.param)


@pytest.fixture
def strict_promotion():
    """Own code must pass it; optax's Adam does not."""
    jax = pytest.importorskip("jax", reason="the test is about JAX")
    with jax.numpy_dtype_promotion("strict"):
        yield
