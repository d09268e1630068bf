"""`import polyamp_jax.jmp_compat as jmp`: jmp's public names over polyamp's core.

    get_policy     `polyamp.Policy.parse`, with jmp's readings of "half" and of a dtype alone
    Policy         jmp's three dtypes and casts
    *LossScale     jmp's immutable scales; `DynamicLossScale.adjust` is polyamp's state machine

Differences from jmp 0.0.4, each on purpose: `min_loss_scale` is kept under jit, where jmp falls
back to 1; a float16 or bfloat16 loss scale becomes float32; the scale is never below 2**-126; a
counter already past `period` still grows the scale; the scale is cut by a multiplication with
1 / factor, which is jmp's division bit for bit where the factor is a power of two; texts that jmp
refuses may be read, in any spelling `polyamp.Policy.parse` knows.
Source of the behaviour: google-deepmind/jmp, jmp/_src/policy.py and loss_scale.py, version 0.0.4.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import polyamp
from polyamp._scaling import MIN_SCALE
from polyamp._xp import F32_MAX
from polyamp_jax._cast import cast
from polyamp_jax._ops import select, xp

dtype_to_names: Mapping[Any, tuple[str, ...]] = MappingProxyType(
    {
        jnp.bfloat16: ("bf16", "bfloat16"),
        jnp.float16: ("f16", "float16"),
        jnp.float32: ("full", "f32", "float32"),
        jnp.float64: ("f64", "float64"),
    }
)
"""jmp's dtypes and the names it reads for each; the first is the one it prints."""
_DTYPES = {names[-1]: dtype for dtype, names in dtype_to_names.items()}


@dataclasses.dataclass(frozen=True)
class Policy:
    """Dtypes of parameters, computation and outputs, as they were given."""

    param_dtype: Any
    compute_dtype: Any
    output_dtype: Any

    def cast_to_param(self, x: Any) -> Any:
        """The tree `x` with its floating arrays in the parameter dtype."""
        return cast(x, self.param_dtype)

    def cast_to_compute(self, x: Any) -> Any:
        """The tree `x` with its floating arrays in the compute dtype."""
        return cast(x, self.compute_dtype)

    def cast_to_output(self, x: Any) -> Any:
        """The tree `x` with its floating arrays in the output dtype."""
        return cast(x, self.output_dtype)

    def with_output_dtype(self, output_dtype: Any) -> Policy:
        """The same policy with another output dtype."""
        return dataclasses.replace(self, output_dtype=output_dtype)

    def __str__(self) -> str:
        dtypes = (self.param_dtype, self.compute_dtype, self.output_dtype)
        names = [dtype_to_names[_DTYPES[jnp.dtype(dtype).name]][0] for dtype in dtypes]
        return "p={},c={},o={}".format(*names)


def get_policy(policy_name: str) -> Policy:
    """The policy that `policy_name` means: a dtype alone, or keys such as "c=f16,o=full".

    The keys are p, c, o or params, compute, output. Names of dtypes are all that
    `polyamp.Policy.parse` reads; a dtype alone sets all three, "bf16" too; "half" is `half_dtype`.

    Raises:
        PolicyError (a ValueError): the name cannot be read.
    """
    text = policy_name if "=" in policy_name else f"p={policy_name}"
    half = jnp.dtype(half_dtype()).name
    parts = [part.partition("=") for part in text.split(",")]
    named = [f"{key}={half if value.strip() == 'half' else value}" for key, _, value in parts]
    try:
        core = polyamp.Policy.parse(",".join(named))
    except polyamp.PolicyError as error:
        raise polyamp.PolicyError(f"Unknown dtype or key in {policy_name!r}: {error}") from None
    chosen = (core.param_dtype, core.compute_dtype, core.output_dtype)
    polyamp.require_supported(core, "jmp", param=_DTYPES, compute=_DTYPES, output=_DTYPES)
    return Policy(*(_DTYPES[name] for name in chosen))


def half_dtype() -> Any:
    """bfloat16 on a TPU, else float16."""
    return jnp.bfloat16 if jax.local_devices()[0].platform == "tpu" else jnp.float16


def cast_to_full(tree: Any) -> Any:
    """`tree` with its floating arrays in float32."""
    return cast(tree, jnp.float32)


def cast_to_half(tree: Any) -> Any:
    """`tree` with its floating arrays in `half_dtype`."""
    return cast(tree, half_dtype())


class _NotScalarError(AssertionError, ValueError):
    """jmp raises AssertionError for a predicate that is no boolean scalar."""


@dataclasses.dataclass(frozen=True)
class NoOpLossScale:
    """No scaling."""

    @property
    def loss_scale(self) -> int:
        """Always 1."""
        return 1

    def scale(self, tree: Any) -> Any:
        """`tree` itself."""
        return tree

    def unscale(self, tree: Any) -> Any:
        """`tree` itself."""
        return tree

    def adjust(self, grads_finite: Any) -> NoOpLossScale:
        """The same."""
        return self


class _Scaling:
    """Multiplication by a scale and its reciprocal; dtypes promote as JAX does."""

    loss_scale: Any

    def scale(self, tree: Any) -> Any:
        """`tree` times the scale."""
        return jax.tree.map(lambda x: x * self.loss_scale, tree)

    def unscale(self, tree: Any) -> Any:
        """`tree` times the reciprocal of the scale."""
        inverse = 1 / self.loss_scale
        return jax.tree.map(lambda x: x * inverse, tree)


@dataclasses.dataclass(frozen=True)
class StaticLossScale(_Scaling):
    """A scale that never changes."""

    loss_scale: Any

    def adjust(self, grads_finite: Any) -> StaticLossScale:
        """The same."""
        return self


@dataclasses.dataclass(frozen=True)
class DynamicLossScale(_Scaling):
    """Multiplied by `factor` after `period` finite steps, divided by it after one that is not.

    Attributes:
        loss_scale: 0-d floating array or a float.
        counter: 0-d i32, finite steps since the last change.
        period: finite steps until growth, at least 1.
        factor: above 1.
        min_loss_scale: the scale is cut no lower; a concrete number, static under jit.

    Raises (in `adjust`):
        RuleError: period, factor or min_loss_scale is outside its range.
    """

    loss_scale: Any
    counter: Any = dataclasses.field(default_factory=lambda: np.zeros([], np.int32))
    period: int = 2000
    factor: float = 2
    min_loss_scale: Any = dataclasses.field(default_factory=lambda: np.ones([], np.float32))

    def __post_init__(self) -> None:
        for name in ("loss_scale", "min_loss_scale"):
            dtype = jnp.result_type(getattr(self, name))
            if not jnp.issubdtype(dtype, jnp.floating):
                warnings.warn(f"Expected floating type for {name}, got {dtype}", stacklevel=3)
            elif dtype in (jnp.float16, jnp.bfloat16):
                object.__setattr__(self, name, cast(getattr(self, name), jnp.float32))

    def adjust(self, grads_finite: Any) -> DynamicLossScale:
        """The scale of the next step, `grads_finite` being a 0-d bool array."""
        _require_scalar(grads_finite)
        rule = polyamp.Dynamic(
            init_scale=max(1.0, float(self.min_loss_scale)),
            growth_factor=self.factor,
            backoff_factor=1 / self.factor,
            growth_interval=int(self.period),
            min_scale=max(MIN_SCALE, float(self.min_loss_scale)),
            max_scale=F32_MAX,
        )
        state = rule.init(xp)._replace(
            loss_scale=jnp.asarray(self.loss_scale, jnp.float32),
            clean=jnp.asarray(self.counter, jnp.int32),
        )
        new = polyamp.bind(rule, xp)(state, polyamp.Signal(finite=grads_finite))
        return dataclasses.replace(self, loss_scale=new.loss_scale, counter=new.clean)


LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale
"""Any of the three."""


def _flatten(scale: DynamicLossScale) -> tuple[tuple[Any, Any], tuple[Any, ...]]:
    return (scale.loss_scale, scale.counter), (
        scale.period,
        scale.factor,
        float(scale.min_loss_scale),
    )


def _unflatten(static: tuple[Any, ...], dynamic: tuple[Any, Any]) -> DynamicLossScale:
    made = object.__new__(DynamicLossScale)
    values = (*dynamic, *static[:2], np.float32(static[2]))
    for field, value in zip(dataclasses.fields(made), values, strict=True):
        object.__setattr__(made, field.name, value)
    return made


jax.tree_util.register_pytree_node(DynamicLossScale, _flatten, _unflatten)
for _kind in (NoOpLossScale, StaticLossScale):
    jax.tree_util.register_pytree_node(_kind, lambda x: ((), x), lambda x, _: x)


def all_finite(tree: Any) -> jax.Array:
    """0-d bool: every number in `tree` is finite; True where there is none."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.result_type(leaf) != jax.dtypes.float0]
    flags = [jnp.isfinite(leaf).all() for leaf in leaves]
    return jnp.stack(flags).all() if flags else jnp.array(True)


def select_tree(pred: Any, a: Any, b: Any) -> Any:
    """`a` where `pred` (0-d bool array) is true, else `b`; trees of one structure.

    Raises:
        AssertionError (also a ValueError): `pred` is no boolean scalar.
    """
    _require_scalar(pred)
    return select(pred, a, b)


def _require_scalar(pred: Any) -> None:
    if jnp.ndim(pred) != 0 or jnp.result_type(pred) != jnp.bool_:
        raise _NotScalarError(
            f"expected boolean scalar, got shape {jnp.shape(pred)} and dtype"
            f" {jnp.result_type(pred)}; reduce it first (all_finite does)"
        )
