"""Which of JAX's primitives run in which precision under `autocast`: data, nothing else.

    MATMUL       floating operands in the policy's compute dtype
    FLOAT32      operands in float32, by family
    ARITHMETIC   in the widest dtype of the operands; in float32 where only FLOAT32 uses the result
    EXACT        in the widest dtype of the operands; moves, orders or compares, rounds nothing
    INDEPENDENT  operands as they come, each for itself
    FUNCTIONS    functions of JAX that are a jit of their own: operands in float32, by family
    NARROW       custom_jvp functions whose float32 result the operand's dtype holds exactly

What is on no list runs in the dtypes it was traced in. The families are those of torch's list
"CUDA Ops that can autocast to float32", with logistic added. Losses, softmaxes and norms outside
FUNCTIONS are made of `exp` and `sum`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

Names = frozenset[str]


def _names(text: str) -> Names:
    return frozenset(text.split())


MATMUL = _names("dot_general conv_general_dilated")

FLOAT32: Mapping[str, Names] = MappingProxyType(
    {
        "exp": _names(
            "exp exp2 expm1 log log1p pow integer_pow square rsqrt logistic tan sinh cosh acos asin"
            " acosh asinh atanh erfc erf_inv lgamma digamma"
        ),
        "sum": _names(
            "reduce_sum reduce_prod cumsum cumprod cumlogsumexp reduce_window_sum"
            " select_and_scatter_add psum psum_invariant reduce_scatter"
        ),
    }
)

ARITHMETIC = _names(
    "add add_any sub mul div rem sqrt cbrt sin cos tanh atan atan2 erf floor ceil round"
)

EXACT = _names(
    "broadcast_in_dim reshape transpose squeeze rev slice dynamic_slice dynamic_update_slice gather"
    " pad concatenate split stack unstack tile select_n copy name abs neg sign max min clamp"
    " reduce_max reduce_min reduce_window_max reduce_window_min cummax cummin argmax argmin top_k"
    " eq ne lt le gt ge is_finite sharding_constraint reshard pvary all_gather all_to_all ppermute"
    " pmax pmin"
)

INDEPENDENT = _names("optimization_barrier sort stop_gradient")

CONSTANT = _names("broadcast_in_dim reshape squeeze convert_element_type stop_gradient")
"""Primitives whose result is a scalar constant, spread out, where their operand is one."""

FUNCTIONS: Mapping[str, Names] = MappingProxyType(
    {"softmax": _names("softmax log_softmax"), "norm": _names("norm")}
)

NARROW = _names("relu")


WIDENED = Names().union(*FLOAT32.values())
WIDENED_FUNCTIONS = Names().union(*FUNCTIONS.values())
