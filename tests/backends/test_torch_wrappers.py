"""Policies beside what else gets at a model: DDP, tied weights, parametrizations, buffers."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import polyamp
import polyamp.torch as amp

nn = torch.nn
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def _rank(rank, port, results):
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = {}
    for policy in ("fp16", "bf16-true"):
        model = DistributedDataParallel(amp.apply_policy(nn.Linear(2, 1), policy))
        model(torch.full((1, 2), 1.0 + rank)).sum().backward()
        found[policy] = model.module.weight.grad.tolist()
    wrapped = DistributedDataParallel(nn.Linear(2, 1))
    try:
        amp.apply_policy(wrapped, "bf16-true")
    except polyamp.PolicyError as error:
        found["refused"] = str(error)
    found["dtype"] = str(wrapped.module.weight.dtype)
    amp.apply_policy(wrapped, "bf16")
    wrapped(torch.full((1, 2), 1.0 + rank)).sum().backward()
    found["after"] = wrapped.module.weight.grad.tolist()
    results.put((rank, found))
    torch.distributed.destroy_process_group()


def test_two_ranks_reduce_gradients_under_every_policy():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, port, results)) for r in range(2)]
    for process in ranks:
        process.start()
    found = dict(results.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]
    for rank in range(2):
        for policy in ("fp16", "bf16-true", "after"):
            assert found[rank][policy] == [[1.5, 1.5]]
        assert "would no longer reduce; apply or remove it before" in found[rank]["refused"]
        assert found[rank]["dtype"] == "torch.float32"


def test_one_weight_in_two_low_formats():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    x = torch.randn(2, 4)
    amp.apply_policy(model, polyamp.PolicyMap({"1": "bf16"}, default="fp16"))
    weight = model[0].weight.detach()
    middle = (x.half() @ weight.half().T).to(BF16)
    assert torch.equal(model(x), (middle @ weight.to(BF16).T).float())


@pytest.mark.parametrize("policy", ["16-true", "bf16-true", "O2", "64-true"])
def test_spectral_norm(policy):
    torch.manual_seed(0)
    linear = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    model = amp.apply_policy(nn.Sequential(linear), policy)
    assert model(torch.randn(4, 8)).isfinite().all()
    amp.remove_policy(model)
    assert {t.dtype for t in model.state_dict().values()} == {F32}


def test_float64_takes_buffers_along():
    class Rotated(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.register_buffer("turn", torch.eye(4))
            self.register_buffer("count", torch.zeros(1, dtype=torch.long))

        def forward(self, x):
            return self.inner(x) @ self.turn

    model = amp.apply_policy(Rotated(), "64-true")
    assert model(torch.ones(1, 4)).dtype == torch.float64
    assert (model.turn.dtype, model.count.dtype) == (torch.float64, torch.long)
    amp.remove_policy(model)
    assert (model.turn.dtype, model.inner.weight.dtype) == (F32, F32)
    assert amp.apply_policy(model, "bf16-true").turn.dtype == F32


def test_removing_goes_by_name():
    model = nn.Linear(3, 3)
    amp.apply_policy(model, "bf16-true")
    model.extra = nn.Parameter(torch.ones(1, dtype=torch.float64))
    del model.weight
    amp.remove_policy(model)
    assert (model.bias.dtype, model.extra.dtype) == (F32, torch.float64)


def test_masters_made_before_the_policy_take_over_parameters_and_state():
    model = nn.Linear(4, 1, bias=False)
    model.weight.data.fill_(1.0)
    optimizer = amp.MasterWeights(torch.optim.SGD(model.parameters(), 1e-4, momentum=0.5))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    amp.apply_policy(model, "bf16-true")
    for _ in range(100):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().float().backward()
        optimizer.step()
    (master,) = optimizer.master_parameters()
    assert master.dtype == optimizer.state[master]["momentum_buffer"].dtype == F32
    assert master[0, 0].item() < 1.0 - 100 * 1e-4
    assert model.weight.dtype == BF16
    assert torch.equal(model.weight, master.to(BF16))


def test_sparse_and_dense_gradients_add_up():
    table = nn.Parameter(torch.ones(4, 2, dtype=BF16))
    optimizer = amp.MasterWeights(torch.optim.SGD([table], 1.0))
    index = torch.tensor([1])
    for sparse in (True, False, True):
        nn.functional.embedding(index, table, sparse=sparse).sum().backward()
        optimizer.accumulate()
    optimizer.step()
    assert table.tolist() == [[1.0, 1.0], [-2.0, -2.0], [1.0, 1.0], [1.0, 1.0]]


def test_a_map_says_whether_to_scale():
    half = polyamp.PolicyMap({"head": "fp16"}, default="bf16")
    assert amp.GradScaler("cpu", policy=half).is_enabled()
    assert not amp.GradScaler("cpu", policy=polyamp.PolicyMap(default="bf16")).is_enabled()


def test_a_dict_is_told_about_maps():
    with pytest.raises(polyamp.PolicyError, match="For rules by module path write PolicyMap"):
        amp.apply_policy(nn.Linear(1, 1), {"head": "float32"})


def test_the_tree_shows_every_rule():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    rules = polyamp.PolicyMap({"0": "float32", "op:softmax": "bf16"}, default="float32")
    tree = amp.policy_tree(amp.apply_policy(model, rules)).splitlines()
    assert "rule '0'" in tree[1]
    assert "rule" not in tree[2]
    assert tree[-1] == "op:softmax  bfloat16"
