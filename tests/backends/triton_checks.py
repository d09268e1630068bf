"""The Triton kernel under Triton's interpreter, on the CPU; run by test_torch_triton.py."""

from __future__ import annotations

import pytest
import torch
from torch_scaler_cases import INF, NAN, OPTIMIZERS, make_scaler

import polyamp
from polyamp_torch import _triton
from polyamp_torch._inspect import Range, amaxes
from polyamp_torch._triton import BLOCK, one_pass

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
pytestmark = [
    pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # numpy, inside it
]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernel takes CPU tensors; how many it was given, call by call."""
    calls: list[int] = []

    def usable(values: list[torch.Tensor]) -> bool:
        return all(map(_triton._is_plain, values))

    def counted(values: list[torch.Tensor], inverse: torch.Tensor | None = None) -> _triton.Found:
        calls.append(len(values))
        return one_pass(values, inverse)

    monkeypatch.setattr(_triton, "usable", usable)
    monkeypatch.setattr(_triton, "one_pass", counted)
    return calls


def values(dtype: torch.dtype, *sizes: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=source).to(dtype) for size in sizes]


@pytest.mark.parametrize(
    ("shape", "dtype", "bad"),
    [
        *(((512, 512), torch.float32, bad) for bad in (NAN, INF)),
        *(((100_003,), dtype, NAN) for dtype in DTYPES),
        *(((5_000,), dtype, bad) for dtype in DTYPES for bad in (NAN, -NAN, INF, -INF)),
    ],
)
def test_one_entry_that_is_not_finite_is_found(shape, dtype, bad):
    size = torch.Size(shape).numel()
    for at in (BLOCK - 1, BLOCK, size - 1):
        x = torch.ones(shape, dtype=dtype)
        x.view(-1)[at] = bad
        found = one_pass([torch.ones(3, dtype=dtype), x])
        assert not found.finite
        assert found.amax.isnan() if bad != bad else found.amax == INF
        if size < BLOCK * 2:
            assert not one_pass([x], torch.tensor(0.5)).finite


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_of_many(dtype):
    group = values(dtype, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 20_000)
    for i in range(len(group)):
        group[i].view(-1)[-1] = -50.0 - i
        found = one_pass(group)
        assert found.finite
        assert (found.amax.dtype, found.amax.shape, found.amax.item()) == (
            torch.float32,
            torch.Size(),
            50.0 + i,
        )


def test_mixed_dtypes_zeros_and_subnormals():
    group = [values(dtype, 100)[0] for dtype in DTYPES]
    group[2][5] = 77.0
    assert one_pass(group).amax == 77.0
    assert one_pass([torch.zeros(9)]).amax == 0.0
    tiny = torch.tensor([0.0, -(2.0**-149)])
    assert one_pass([tiny]).amax == 2.0**-149
    assert one_pass([torch.tensor([2.0**-24], dtype=torch.float16)]).amax == 2.0**-24


@pytest.mark.parametrize("dtype", DTYPES)
def test_unscaling_is_torchs_own(dtype):
    ours, theirs = (values(dtype, 5, BLOCK, 10_000) for _ in range(2))
    # The interpreter cuts bfloat16 off where the device rounds.
    inverse = torch.tensor(2.0**-11 if dtype == torch.bfloat16 else 1.0 / 3000.0)
    flag = torch.zeros(())
    top = max(float(x.abs().max()) for x in ours)
    found = one_pass(ours, inverse)
    torch._amp_foreach_non_finite_check_and_unscale_(theirs, flag, inverse)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert (found.amax.item(), bool(found.finite)) == (top, True)
    assert all(x._version == 1 for x in ours)


def test_what_is_infinite_once_unscaled_is_not_finite():
    big = torch.tensor([1e38])
    found = one_pass([big], torch.tensor(16.0))
    assert (found.amax.item(), bool(found.finite)) == (torch.tensor(1e38).item(), False)
    half = torch.tensor([60000.0], dtype=torch.float16)
    assert one_pass([half], torch.tensor(1.0)).finite
    assert not one_pass([half], torch.tensor(2.0)).finite


def test_a_view_that_is_not_aligned():
    base = torch.ones(BLOCK * 2 + 1)
    base[-1] = 5.0
    assert one_pass([base[1:]], torch.tensor(2.0)).amax == 5.0
    assert (base[0].item(), base[1].item(), base[-1].item()) == (1.0, 2.0, 10.0)


def test_amaxes_and_ranges_use_it(on_cpu):
    grads = values(torch.float32, 100, 200)
    assert next(iter(amaxes(grads).values())) == max(g.abs().max() for g in grads)
    seen = Range(wants_sub=True)
    flag = seen.note_and_unscale(grads, torch.tensor(0.5), torch.zeros(()))
    assert flag is not None
    assert next(iter(flag.values())) == 0.0
    assert len(seen.sub) == 1
    assert on_cpu == [2, 2]
    gaps = [torch.ones(4, 4)[:, 1:]]
    assert seen.note_and_unscale(gaps, torch.tensor(0.5), torch.zeros(())) is None
    assert next(iter(amaxes([*gaps, torch.ones(2, dtype=torch.float64)]).values())) == 1.0
    assert on_cpu == [2, 2]
    carried = seen.note_and_unscale(grads, torch.tensor(0.5), torch.ones(()))
    assert carried is not None
    assert next(iter(carried.values())) == 1.0


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["host", "device"])
def test_a_training_is_the_same_with_and_without(kind, mode, request):
    def trained() -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        optimizer = OPTIMIZERS[kind](net.parameters(), lr=0.1)
        scaler, scales = make_scaler(mode, rule="auto"), []
        for step in range(8):
            optimizer.zero_grad()
            scaler.scale(net(torch.randn(4, 8)).square().mean()).backward()
            if step in (3, 4):
                net[2].bias.grad.fill_(NAN)
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.state)
        return scales, torch.cat([p.detach().flatten() for p in net.parameters()])

    want = trained()
    calls = request.getfixturevalue("on_cpu")
    got = trained()
    assert got[0] == want[0]
    assert torch.equal(got[1], want[1])
    assert len(calls) == 8
    assert polyamp.resolve_rule("auto").wants_amax
