"""Fixtures of the backends' tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
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


LIGHT = (
    "test_jax_adaptive",
    "test_jax_autocast",
    "test_jax_describe",
    "test_jax_equinox",
    "test_jax_linen",
    "test_jax_nnx",
    "test_jax_policy",
    "test_jax_selector",
    "test_jax_shift",
    "keras_calibrate",
    "keras_demo",
    "keras_models",
    "keras_policies",
    "keras_selector",
)
"""Tests of what a program computes, not of how it is compiled: policies, statistics, demos."""


@pytest.fixture(autouse=True, scope="module")
def compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """LLVM's optimizations take half of such tests' time and change nothing that they look at."""
    jax = sys.modules.get("jax")
    if jax is None:
        yield
        return
    light = request.path.name.startswith(LIGHT)
    jax.config.update("jax_disable_most_optimizations", light)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
