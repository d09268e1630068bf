"""Operations that are computed in float32 inside a low-precision policy, by family.

    softmax   exponentials of all entries, whose sum must not lose the small ones
    norm      means of squares, which leave float16's range from entries of 256 on
    loss      sums over a batch; what the gradient starts from
    exp       steep functions: a rounding of the input becomes a large error of the output
    sum       long sums, where the small terms would be lost one by one

One list for every framework, under torch's names; docs/operations.md has what each framework does
by itself. Source: torch's documentation of automatic mixed precision, "CUDA Ops that can autocast
to float32".
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FLOAT32_OPERATIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "softmax": _names("softmax log_softmax softmin gumbel_softmax"),
        "norm": _names(
            "layer_norm group_norm rms_norm local_response_norm normalize norm vector_norm"
            " matrix_norm cosine_similarity pairwise_distance renorm dist pdist cdist"
        ),
        "loss": _names(
            "cross_entropy nll_loss binary_cross_entropy binary_cross_entropy_with_logits mse_loss"
            " l1_loss smooth_l1_loss huber_loss kl_div poisson_nll_loss gaussian_nll_loss"
            " cosine_embedding_loss hinge_embedding_loss margin_ranking_loss"
            " multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss"
            " soft_margin_loss triplet_margin_loss triplet_margin_with_distance_loss ctc_loss"
        ),
        "exp": _names(
            "exp expm1 log log10 log2 log1p logsumexp pow reciprocal rsqrt softplus logsigmoid acos"
            " asin cosh sinh tan erfinv square"
        ),
        "sum": _names("sum prod cumsum cumprod logcumsumexp"),
    }
)
"""Names of operations by family, in the order of `polyamp._policy_pattern.OP_FAMILIES`."""
