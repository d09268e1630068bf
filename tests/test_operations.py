"""The list of float32 operations is one, and every framework has it."""

from __future__ import annotations

import pytest

from polyamp._operations import FLOAT32_OPERATIONS
from polyamp._policy_pattern import OP_FAMILIES

JAX = {
    "erfinv": "erf_inv",
    "logcumsumexp": "cumlogsumexp",
    "sum": "reduce_sum",
    "prod": "reduce_prod",
}
"""How JAX's primitives are called where torch's name is another."""
COMPOSED = {"log10", "log2", "logsumexp", "reciprocal", "softplus", "logsigmoid"}
"""In JAX made of other primitives, or (reciprocal) a division."""


def test_families() -> None:
    assert OP_FAMILIES == ("softmax", "norm", "loss", "exp", "sum")
    names = [name for names in FLOAT32_OPERATIONS.values() for name in names]
    assert len(names) == len(set(names)) > 50


def test_torch_widens_every_one_and_no_other_function() -> None:
    pytest.importorskip("torch")
    from polyamp_torch._families import FAMILY_OF, PROMOTE

    wide = {name: f for name, f in FAMILY_OF.items() if f != PROMOTE and not name.startswith("__")}
    assert wide == {name: f for f, names in FLOAT32_OPERATIONS.items() for name in names}


def test_jax_widens_every_primitive_of_them() -> None:
    pytest.importorskip("jax")
    from polyamp_jax._primitives import FLOAT32, FUNCTIONS

    for family in ("exp", "sum"):
        wanted = {JAX.get(n, n) for n in FLOAT32_OPERATIONS[family] if n not in COMPOSED}
        assert wanted <= FLOAT32[family], family
    assert {"softmax", "log_softmax"} <= FUNCTIONS["softmax"]


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "layer_norm", "exp", "cumsum", "sum"])
def test_torch_and_jax_give_float32_for_the_same_call(name: str) -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    import polyamp.jax
    import polyamp.torch

    def mean_and_variance(x):
        return (x - x.mean(-1, keepdims=True)) / (x.var(-1, keepdims=True) + 1e-5) ** 0.5

    ours = {
        "softmax": (lambda x: x.softmax(-1), jax.nn.softmax),
        "log_softmax": (lambda x: x.log_softmax(-1), jax.nn.log_softmax),
        "layer_norm": (
            lambda x: torch.nn.functional.layer_norm(x, (4,)),
            mean_and_variance,
        ),
        "exp": (torch.exp, jax.numpy.exp),
        "cumsum": (lambda x: x.cumsum(-1), lambda x: jax.numpy.cumsum(x, -1)),
        "sum": (lambda x: x.sum(-1), lambda x: x.sum(-1)),
    }
    of_torch, of_jax = ours[name]

    class Net(torch.nn.Module):
        def forward(self, x):
            low = x @ x
            found.append(low.dtype)
            wide = of_torch(low)
            found.append(wide.dtype)
            return wide

    found: list[torch.dtype] = []
    polyamp.torch.apply_policy(Net(), "bf16")(torch.eye(4))
    assert found == [torch.bfloat16, torch.float32]
    call = polyamp.jax.autocast(lambda x: of_jax(x @ x), "bf16")
    jaxpr = str(jax.make_jaxpr(call)(jax.numpy.eye(4)))
    assert "bf16" in jaxpr.split("dot_general")[0]
    assert call(jax.numpy.eye(4)).dtype == jax.numpy.float32
