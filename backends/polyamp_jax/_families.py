"""Modules whose operations stay in float32: norms, and the softmax of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from polyamp_jax._cast import cast

_NORMS = ("LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm", "BatchNorm")


def norm_types(home: ModuleType) -> tuple[type, ...]:
    """The norms of a module system, `home` being flax.linen, flax.nnx or equinox.nn."""
    return tuple(getattr(home, name) for name in _NORMS if hasattr(home, name))


@dataclass(frozen=True)
class WideSoftmax:
    """flax.nnx's `dot_product_attention` with its softmax in float32, outputs as before.

    Without dropout and without sown weights it is `jax.nn.dot_product_attention`, whose softmax
    is in float32 already. Otherwise flax offers no such choice, and all of it is computed in
    float32; so it is in float16 on a CPU, where JAX 0.10 cannot compile that function.
    """

    attention: Callable[..., Any]

    def __call__(self, query: Any, key: Any, value: Any, **kwargs: Any) -> jax.Array:
        """The attended values."""
        fused = not kwargs.get("dropout_rate") and kwargs.get("module") is None
        if fused and not (query.dtype == jnp.float16 and jax.default_backend() == "cpu"):
            narrow: jax.Array = self.attention(query, key, value, **kwargs)
            return narrow
        wide = cast((query, key, value), "float32")
        out: jax.Array = self.attention(*wide, **{**kwargs, "dtype": jnp.float32})
        return out.astype(query.dtype)
