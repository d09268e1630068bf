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
    table = trainer(**options).train(problem(), 4, val_dataloader=problem(2))
    columns = ["epoch", "loss", "scale", "grad_norm", "skipped", "seconds", "val_mse"]
    assert list(table.columns) == columns
    assert table["epoch"].tolist() == [1, 2, 3, 4]
    assert table["loss"].iloc[-1] < 0.5 * table["loss"].iloc[0]
    assert table["val_mse"].iloc[-1] < table["val_mse"].iloc[0]
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
    whole, parts = trainer(), trainer(accumulation_steps=2)
    whole.train(joined, 1)
    parts.train(problem(), 1)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_one_bad_micro_batch_skips_the_whole_window_once():
    # windows (0, 1) (2, 3) (4, 5) (6, 7): the second has a bad batch
    ours = trainer(fp16=True, accumulation_steps=2, rule=LOW_START)
    table = ours.train(problem(bad=[3]), 1)
    clean = trainer(fp16=True, accumulation_steps=2, rule=LOW_START)
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
    start = [p.detach().clone() for p in net.parameters()]
    seen = []
    ours.ema.update = lambda: (seen.append(1), type(ours.ema).update(ours.ema))
    ours.train(problem(4, bad=[1]), 1)
    assert optimizer.param_groups[0]["lr"] == 1 / 8
    assert len(seen) == 3
    for average, old, now in zip(
        ours.ema.module.parameters(), start, net.parameters(), strict=True
    ):
        assert not torch.equal(average, old)
        assert not torch.equal(average, now)


def test_evaluation_uses_the_average_and_leaves_the_mode():
    ours = trainer(ema_decay=0.999)
    ours.train(problem(), 2)
    with torch.no_grad():
        average = sum(mse(ours.ema.module(x), y).item() for x, y in problem(2)) / 2
        last = sum(mse(ours.model(x), y).item() for x, y in problem(2)) / 2
    assert ours.evaluate(problem(2)) == pytest.approx(average)
    assert average > 1.1 * last
    assert not any(module.training for module in ours.ema.module.modules()) or ours.model.training


@pytest.mark.parametrize(
    "options", [{"fp16": True, "bf16": True}, {"fp16": True, "policy": "bf16"}, {"policy": "fp17"}]
)
def test_contradictions_are_refused(options):
    with pytest.raises(polyamp.PolicyError):
        trainer(**options)


@pytest.mark.parametrize("name", ["scheduler", "metric"])
def test_a_word_is_no_scheduler_and_no_metric(name):
    with pytest.raises(TypeError, match=f"{name} must be .*, got 'cosine'"):
        trainer(**{name: "cosine"})


@pytest.mark.parametrize("steps", [0, -1, True, 1.5])
def test_accumulation_steps_is_a_count(steps):
    with pytest.raises(ValueError, match="accumulation_steps must be a whole number"):
        trainer(accumulation_steps=steps)


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


class TestHistory:
    @pytest.mark.parametrize("options", [{}, {"bf16": True}])
    def test_without_scaling_nan_shows(self, options):
        data = problem(4)
        data[1] = (data[1][0] * float("nan"), data[1][1])
        table = trainer(**options).train(data, 2)
        assert table["loss"].isna().tolist() == [True, True]
        assert table["skipped"].tolist() == [0, 0]

    def test_an_epoch_of_skips_has_no_loss(self):
        table = trainer(fp16=True, rule=LOW_START).train(problem(3, bad=(0, 1, 2)), 1)
        assert table["skipped"].tolist() == [3]
        assert table[["loss", "grad_norm"]].isna().all(axis=None)

    def test_skipped_steps_do_not_count(self):
        data = problem(3, bad=(1,))
        with_skip = trainer(fp16=True, rule=LOW_START).train(data, 1)
        without = trainer(fp16=True, rule=LOW_START).train([data[0], data[2]], 1)
        for column in ("loss", "grad_norm"):
            assert with_skip[column].item() == pytest.approx(without[column].item(), rel=1e-3)

    def test_an_exhausted_generator_is_refused(self):
        ours = trainer()
        with pytest.raises(ValueError, match="gave no batch; a generator is exhausted"):
            ours.train((batch for batch in problem(2)), 2)
        with pytest.raises(ValueError, match="no batch to evaluate"):
            ours.evaluate([])

    def test_epochs_go_on_and_the_metric_has_a_column_of_its_own(self):
        def loss(outputs, target):
            return torch.tensor(42.0)

        ours = trainer(metric=loss)
        ours.train(problem(), 2)
        table = ours.train(problem(), 1, val_dataloader=problem(2))
        assert table["epoch"].tolist() == [3]
        assert table["val_loss"].tolist() == [42.0]
        assert table["loss"].item() != 42.0
        for wrong in (0, 1.5, "2", True):
            with pytest.raises(ValueError, match=f"num_epochs must be .* from 1, got {wrong!r}"):
                ours.train(problem(), wrong)
        assert ours.epoch == 3


class TestModesAndPrecision:
    def test_frozen_modules_stay_in_eval_mode(self):
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), model())
        net[1].eval()
        before = net[1].running_mean.clone()
        ours = trainer(net)
        ours.train(problem(), 1, val_dataloader=problem(2))
        assert [net.training, net[0].training, net[1].training] == [True, True, False]
        assert torch.equal(net[1].running_mean, before)

    def test_evaluating_puts_modes_back_after_an_error(self):
        ours = trainer(metric=lambda outputs, target: 1 / 0)
        ours.model.train()
        with pytest.raises(ZeroDivisionError):
            ours.evaluate(problem(1))
        assert all(module.training for module in ours.model.modules())

    @pytest.mark.parametrize(
        ("policy", "dtype"), [("64-true", torch.float64), ("16-true", torch.float32)]
    )
    def test_the_criterion_gets_at_least_float32(self, policy, dtype):
        seen = []
        ours = trainer(policy=policy, rule=LOW_START)
        ours.criterion = lambda outputs, target: seen.append(outputs.dtype) or outputs.mean()
        ours.train(problem(1), 1)
        assert seen == [dtype]

    def test_the_policy_of_the_model_is_kept(self):
        rules = polyamp.PolicyMap({"2": "float32"}, default="bf16")
        net = amp.apply_policy(model(), rules)
        tree = amp.policy_tree(net)
        assert amp.policy_tree(trainer(net).model) == tree
        assert "bfloat16" in tree

    @pytest.mark.parametrize("policy", ["bf16-true", "16-true", "fp16"])
    def test_the_average_is_as_fine_as_float32(self, policy):
        net = torch.nn.Linear(1, 1, bias=False)
        net.weight.data.fill_(1.0)
        optimizer = amp.MasterWeights(torch.optim.SGD(net.parameters(), 1e-3))
        ours = amp.Trainer(
            net, optimizer, lambda o, t: o.mean(), policy=policy, rule=LOW_START,
            ema_decay=0.999, progress=False,
        )  # fmt: skip
        expected = weight = 1.0
        for _ in range(300):
            weight -= 1e-3
            expected = 0.999 * expected + 0.001 * weight
        ours.train([(torch.ones(1, 1), torch.ones(1))] * 300, 1)
        assert ours.ema.state_dict()["weight"].item() == pytest.approx(expected, rel=1e-5)
        found = ours.ema.module.weight
        assert found.item() == pytest.approx(expected, rel=max(torch.finfo(found.dtype).eps, 1e-6))
        assert ours.ema.state_dict()["weight"].dtype == torch.float32

    def test_micro_batches_are_summed_in_float32(self):
        net = torch.nn.Linear(1, 1, bias=False)
        net.weight.data.fill_(1.0)
        ours = amp.Trainer(
            net, torch.optim.SGD(net.parameters(), 1e-6), lambda o, t: o.mean(), policy="16-true",
            rule=polyamp.Static(1.0), accumulation_steps=64, progress=False,
        )  # fmt: skip
        first = (torch.full((1, 1), 2048.0), torch.ones(1))
        _, norm = ours.step([first] + [(torch.ones(1, 1), torch.ones(1))] * 63)
        assert norm.item() == pytest.approx((2048 + 63) / 64, rel=1e-6)

    def test_sizes_weigh_and_nested_targets_have_one(self):
        ours = trainer(metric=lambda outputs, target: target["y"].mean())
        batches = [
            (torch.zeros(n, 4), {"y": torch.full((n, 1), value), "other": torch.ones(1)})
            for n, value in ((30, 1.0), (10, 5.0))
        ]
        assert ours.evaluate(batches) == pytest.approx(2.0)


class TestArguments:
    def test_the_model_is_unchanged_after_a_refusal(self):
        net, other = model(), model()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        wrong = [
            ((other, optimizer, mse), {}, "no parameter of this model"),
            ((net, [optimizer], mse), {}, "one torch optimizer, got list"),
            ((net, mse, optimizer), {}, "one torch optimizer, got function"),
            ((net, torch.optim.LBFGS(net.parameters()), mse), {}, "closure"),
            ((net, optimizer, 3), {}, "criterion must be callable, got int"),
            ((torch.nn.ReLU(), optimizer, mse), {}, "module with parameters, got ReLU"),
            (
                (net, optimizer, mse),
                {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)},
                "ReduceLROnPlateau",
            ),
            (
                (net, torch.optim.SGD(net.parameters(), 0.1), mse),
                {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)},
                "built over this optimizer",
            ),
        ]
        for arguments, options, message in wrong:
            with pytest.raises((TypeError, ValueError), match=message):
                amp.Trainer(*arguments, policy="16-true", **options)
        assert {p.dtype for p in (*net.parameters(), *other.parameters())} == {torch.float32}
        assert "forward" not in net.__dict__

    def test_masters_made_before_are_used(self):
        net = model()
        optimizer = amp.MasterWeights(torch.optim.AdamW(net.parameters(), 1e-4))
        ours = amp.Trainer(net, optimizer, mse, policy="bf16-true", progress=False)
        ours.train(problem(2), 1)
        assert ours.optimizer is optimizer
        assert {p.dtype for p in optimizer.master_parameters()} == {torch.float32}
        assert {p.dtype for p in net.parameters()} == {torch.bfloat16}

    @pytest.mark.parametrize("batch", [{"x": 1}, torch.ones(4, 4), [torch.ones(2)]])
    def test_batches_of_another_form(self, batch):
        with pytest.raises(TypeError, match=r"a batch is \(input, ..., target\), got"):
            trainer().step([batch])

    @pytest.mark.parametrize("options", [{"ema_decay": 1.0}, {"max_norm": -1.0}])
    def test_numbers_out_of_range_change_nothing(self, options):
        net = model()
        with pytest.raises((ValueError, polyamp.RuleError)):
            trainer(net, policy="O2", **options)
        assert {p.dtype for p in net.parameters()} == {torch.float32}

    def test_an_empty_window(self):
        with pytest.raises(ValueError, match="at least one batch"):
            trainer().step([])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("policy", ["float32", "fp16", "O2", "bf16-true"])
@pytest.mark.parametrize("where", ["batch", "optimizer"])
def test_an_interrupted_step_leaves_nothing_behind(policy, fused, where):
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0, fused=fused)
    if policy == "bf16-true":
        optimizer = amp.MasterWeights(optimizer)
    ours = amp.Trainer(
        net, optimizer, mse, policy=policy, rule=polyamp.Static(1024.0), accumulation_steps=2,
        progress=False,
    )  # fmt: skip
    window = [(torch.ones(2, 4), torch.ones(2, 1))] * 2
    expected = ours.step(window)[1].item()
    if where == "batch":
        with pytest.raises(AttributeError):
            ours.step([window[0], (torch.ones(2, 4), None)])
    else:

        def stop(*_):
            raise KeyboardInterrupt

        hook = getattr(ours.optimizer, "inner", ours.optimizer).register_step_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            ours.step(window)
        hook.remove()
    for _ in range(2):
        assert ours.step(window)[1].item() == expected
