"""Trainer: a readable loop over policy, scaler, clipping, accumulation, schedule, EMA."""

from __future__ import annotations

import pytest
import torch

import polyamp
import polyamp.torch as amp

pd = pytest.importorskip("pandas", reason="train() returns a DataFrame")
pytestmark = pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")


LOW_START = polyamp.Dynamic.like("torch", init_scale=2.0**10)


def problem(batches=8, bad=()):
    source = torch.Generator().manual_seed(0)
    data = []
    for i in range(batches):
        inputs = torch.randn(16, 4, generator=source)
        target = inputs.sum(1, keepdim=True)
        data.append((inputs * float("inf") if i in bad else inputs, target))
    return data


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def mse(outputs, target):
    return torch.nn.functional.mse_loss(outputs, target)


def trainer(net=None, optimizer=torch.optim.SGD, lr=0.05, **options):
    net = model() if net is None else net
    return amp.Trainer(net, optimizer(net.parameters(), lr=lr), mse, progress=False, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"fp16": True, "rule": LOW_START}, {"bf16": True}, {"policy": "O2", "rule": LOW_START}],
)
def test_it_trains_and_reports_a_row_an_epoch(options):
    table = trainer(**options).train(problem(), 4, held_out=problem(2))
    columns = ["epoch", "loss", "scale", "grad_norm", "skipped", "seconds", "mse"]
    assert list(table.columns) == columns
    assert table["epoch"].tolist() == [1, 2, 3, 4]
    assert table["loss"].iloc[-1] < 0.5 * table["loss"].iloc[0]
    assert table["mse"].iloc[-1] < table["mse"].iloc[0]
    assert (table["grad_norm"] > 0).all()
    assert (table["skipped"] == 0).all()
    assert table["scale"].tolist() == [1024.0 if "rule" in options else 1.0] * 4


def test_float32_equals_the_loop_by_hand():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for inputs, target in problem():
        optimizer.zero_grad()
        mse(net(inputs), target).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    ours = trainer(max_norm=0.5)
    ours.train(problem(), 1)
    for a, b in zip(net.parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_accumulation_is_one_step_a_window():
    joined = [
        tuple(torch.cat(parts) for parts in zip(*pair, strict=True))
        for pair in zip(problem()[::2], problem()[1::2], strict=True)
    ]
    whole, parts = trainer(), trainer(accumulate=2)
    whole.train(joined, 1)
    parts.train(problem(), 1)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_one_bad_micro_batch_skips_the_whole_window_once():
    # windows (0, 1) (2, 3) (4, 5) (6, 7): the second has a bad batch
    ours = trainer(fp16=True, accumulate=2, rule=LOW_START)
    table = ours.train(problem(bad=[3]), 1)
    clean = trainer(fp16=True, accumulate=2, rule=LOW_START)
    clean.train([b for i, b in enumerate(problem()) if i not in (2, 3)], 1)
    assert table["skipped"].item() == 1
    assert table["scale"].item() == 512.0
    for a, b in zip(ours.model.parameters(), clean.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)


def test_the_schedule_and_the_average_wait_on_a_skip():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    halve = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    ours = amp.Trainer(
        net,
        optimizer,
        mse,
        fp16=True,
        rule=LOW_START,
        scheduler=halve,
        max_norm=1e-3,
        ema_decay=0.5,
        progress=False,
    )
    ours.train(problem(4, bad=[1]), 1)
    assert optimizer.param_groups[0]["lr"] == 1 / 8
    assert int(ours.ema.n_averaged) == 3


def test_evaluation_uses_the_average_and_leaves_the_mode():
    ours = trainer(ema_decay=0.999)
    ours.train(problem(), 2)
    with torch.no_grad():
        average = sum(mse(ours.ema(x), y).item() for x, y in problem(2)) / 2
        last = sum(mse(ours.model(x), y).item() for x, y in problem(2)) / 2
    assert ours.evaluate(problem(2)) == pytest.approx(average)
    assert average > 1.1 * last
    assert ours.model.training


@pytest.mark.parametrize(
    "options", [{"fp16": True, "bf16": True}, {"fp16": True, "policy": "bf16"}, {"policy": "fp17"}]
)
def test_contradictions_are_refused(options):
    with pytest.raises(polyamp.PolicyError):
        trainer(**options)


@pytest.mark.parametrize("accumulate", [0, -1, True, 1.5])
def test_accumulate_is_a_count(accumulate):
    with pytest.raises(ValueError, match="accumulate"):
        trainer(accumulate=accumulate)


def test_the_bench_compares_equal_things():
    from polyamp_torch import _bench_policy as bench

    hand, ours = bench.by_hand("cpu"), amp.apply_policy(bench.plain_model("cpu"), bench.RULES)
    bench.hand_pass(hand, "cpu")()
    bench.policy_pass(ours, "cpu")()
    for a, b in zip(hand.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("policy", ["O2", "16-true"])
def test_float16_parameters_get_masters_and_the_schedule_waits_on_skips(policy):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    ours = amp.Trainer(
        net, optimizer, mse, policy=policy, rule=LOW_START, scheduler=schedule, progress=False
    )
    assert isinstance(ours.optimizer, amp.MasterWeights)
    ours.train(problem(3, bad=(1,)), 1)
    assert {p.dtype for p in net.parameters()} == {torch.float16}
    assert (ours.scaler.state.skipped, optimizer.param_groups[0]["lr"]) == (1, 0.0125)
