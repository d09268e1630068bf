"""Which of JAX's primitives run in which precision under `autocast`: data, nothing else.

    MATMUL       floating operands in the policy's compute dtype
    FLOAT32      float16 and bfloat16 operands widened to float32, by family
    ARITHMETIC   in the widest dtype of the operands; in float32 where only FLOAT32 uses the result
    EXACT        in the widest dtype of the operands; moves, orders or compares, and rounds nothing
    INDEPENDENT  operands are left as they come, each for itself
    FUNCTIONS    functions of JAX under a jit of their own: low inputs widened to float32, by family
    NARROW       custom_jvp functions whose float32 result the input's dtype holds exactly

What is on no list runs in the dtypes it was traced with. The families are those of torch's list
"CUDA Ops that can autocast to float32", with logistic added; JAX's losses, softmaxes and norms
outside FUNCTIONS are made of `exp` and `sum`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

MATMUL = frozenset({"dot_general", "conv_general_dilated"})

FLOAT32: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "exp": frozenset(
            (
                "exp exp2 expm1 log log1p pow integer_pow square rsqrt logistic tan sinh cosh acos"
                " asin acosh asinh atanh erfc erf_inv lgamma digamma"
            ).split()
        ),
        "sum": frozenset(
            (
                "reduce_sum reduce_prod cumsum cumprod cumlogsumexp reduce_window_sum"
                " select_and_scatter_add psum psum_invariant reduce_scatter"
            ).split()
        ),
    }
)

ARITHMETIC = frozenset(
    "add add_any sub mul div rem sqrt cbrt sin cos tanh atan atan2 erf floor ceil round".split()
)

EXACT = frozenset(
    (
        "broadcast_in_dim reshape transpose squeeze rev slice dynamic_slice dynamic_update_slice"
        " gather pad concatenate split select_n copy name abs neg sign max min clamp"
        " reduce_max reduce_min reduce_window_max reduce_window_min cummax cummin argmax argmin"
        " top_k eq ne lt le gt ge is_finite sharding_constraint reshard pvary all_gather"
        " all_to_all ppermute pmax pmin"
    ).split()
)

INDEPENDENT = frozenset("optimization_barrier sort stop_gradient".split())

CONSTANT = frozenset("broadcast_in_dim reshape squeeze convert_element_type stop_gradient".split())
"""Primitives whose result is a constant where their operand is a scalar constant."""

FUNCTIONS: Mapping[str, frozenset[str]] = MappingProxyType(
    {"softmax": frozenset({"softmax", "log_softmax"}), "norm": frozenset({"norm"})}
)

NARROW = frozenset({"relu"})

WIDENED = frozenset().union(*FLOAT32.values())
WIDENED_FUNCTIONS = frozenset().union(*FUNCTIONS.values())
