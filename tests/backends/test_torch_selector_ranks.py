"""Adaptive on two ranks: both switch at the same step, whatever each has seen."""

from __future__ import annotations

import socket
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import polyamp.torch as amp  # noqa: E402
from polyamp import Capabilities  # noqa: E402


def _rank(rank: int, port: int, results: Any) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    results.put((rank, _found(rank)))
    torch.distributed.destroy_process_group()


def _found(rank: int) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    scaler = amp.GradScaler("cpu", init_scale=8.0)
    adaptive = amp.Adaptive(model, scaler, capabilities=Capabilities(), every=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    formats = []
    for step in range(8):
        x = torch.full((2, 4), 20000.0 if rank == 1 and step >= 3 else 1.0)
        optimizer.zero_grad()
        loss = model(x).float().mean() * (float("inf") if (rank, step) == (1, 1) else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        adaptive.step()
        formats.append(adaptive.selection.choices["0"].format)
    adaptive.remove()
    amp.remove_policy(model)
    own = Capabilities(frozenset({("float16", "bfloat16")[rank]}), frozenset())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polyamp_torch._adaptive.capabilities_of", lambda device: own)
        common = amp.Adaptive(model).capabilities.formats
    if rank == 1:  # alone
        amp.calibrate(nn.Linear(4, 1), [torch.ones(2, 4)], capabilities=Capabilities())
    return formats, adaptive.statistics["0"].inputs.size, common


def test_two_ranks_decide_alike() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, port, results)) for r in range(2)]
    for process in ranks:
        process.start()
    found = dict(results.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]
    expected = ["float16"] * 3 + ["bfloat16"] * 5
    assert found == {
        0: (expected, 16, frozenset()),
        1: (expected, 16, frozenset()),
    }
