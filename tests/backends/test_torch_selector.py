"""The selector at work in PyTorch: statistics, Adaptive, calibrate, advise."""

from __future__ import annotations

import copy
import json

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import polyamp.torch as amp  # noqa: E402
from polyamp import (  # noqa: E402
    Capabilities,
    ModuleScales,
    PolicyError,
    PolicyMap,
    PolyampError,
    Selector,
    SkippedStepWarning,
    StateError,
)
from polyamp_torch._measure import SAMPLED, raw, sampled  # noqa: E402
from polyamp_torch._watch import Watch, _work  # noqa: E402

CAN = Capabilities()
pytestmark = pytest.mark.filterwarnings(  # torch.compile makes one to trace any autograd.Function
    "ignore:.*should not be instantiated:DeprecationWarning"
)


def model(gain: float = 1.0) -> nn.Sequential:
    torch.manual_seed(0)
    found = nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(inplace=True), nn.LayerNorm(32), nn.Linear(32, 32), nn.Tanh(),
        nn.Linear(32, 4),
    )  # fmt: skip
    with torch.no_grad():
        found[3].weight.mul_(gain)
    return found


def batches(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(1)
    return [
        (torch.randn(64, 16, generator=source), torch.randint(0, 4, (64,), generator=source))
        for _ in range(count)
    ]


class TestNumbers:
    def test_of_a_small_tensor(self) -> None:
        x = torch.tensor([0.0, 2.0**-15, -(2.0**-21), 2.0**-40, 8.0, -1.0, 0.0, 2.0**-14])
        amax, square, size, lost, nonzero, sub, bad, far = raw(x).tolist()
        assert (amax, size, lost, nonzero) == (8.0, 8.0, 0.0, 6.0)
        assert (sub, bad, far) == (3.0, 2.0, 1.0)
        assert square == pytest.approx(65.0)

    def test_nothing_hides_in_a_large_one(self) -> None:
        x = torch.ones(512, 512)
        x[300, 301] = 77.0
        assert raw(x)[0] == 77.0
        x[17, 5] = float("nan")
        amax, _, size, lost, *_ = raw(x).tolist()
        assert amax in (1.0, 77.0)
        assert lost >= 1.0
        assert size == 512 * 512

    def test_shares_of_a_large_one_are_estimated(self) -> None:
        x = torch.where(torch.arange(1_000_000) % 10 == 0, 2.0**-25, 1.0)
        _, _, size, _, nonzero, _, bad, far = raw(x).tolist()
        assert nonzero == size == 1_000_000
        assert bad / size == pytest.approx(0.1, abs=0.01)
        assert far == 0
        assert len(sampled(x)) <= SAMPLED

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_other_formats(self, dtype) -> None:
        assert raw(torch.tensor([1.0, -16376.0], dtype=dtype))[0] == pytest.approx(16376, rel=4e-3)

    def test_of_nothing(self) -> None:
        assert raw(torch.zeros(0, 3)).tolist() == [0.0] * 8


class TestWatch:
    def watched(self, compiled: bool) -> dict:
        net = model()
        watch = Watch(net)
        run = torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net
        (x, y), *_ = batches()
        nn.functional.cross_entropy(run(x), y).backward()
        watch.begin()
        (nn.functional.cross_entropy(run(x), y) * 2.0**10).backward()
        found = watch.end()
        watch.remove()
        assert all("forward" not in module.__dict__ for module in net.modules())
        return found

    @pytest.mark.parametrize("compiled", [False, True])
    def test_the_numbers_are_those_of_the_tensors(self, compiled: bool) -> None:
        found = self.watched(compiled)
        assert list(found) == ["0", "2", "3", "5"]
        net = model()
        (x, y), *_ = batches()
        hidden = net[:5](x)
        logits = net[5](hidden)
        logits.retain_grad()
        (nn.functional.cross_entropy(logits, y) * 2.0**10).backward()
        head = found["5"]
        assert head.output.amax == pytest.approx(logits.abs().max().item())
        assert head.inputs.amax == pytest.approx(hidden.abs().max().item())
        assert head.gradient.amax == pytest.approx(logits.grad.abs().max().item(), rel=1e-5)
        rms = logits.grad.pow(2).mean().sqrt().item()
        assert head.gradient.rms == pytest.approx(rms, rel=1e-5)
        both = torch.cat([p.grad.flatten() for p in net[5].parameters()])
        assert head.weight_gradient.norm == pytest.approx(both.norm().item(), rel=1e-5)
        assert head.work == 32.0

    def test_a_module_called_twice(self) -> None:
        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 4, bias=False)

            def forward(self, x):
                return self.layer(self.layer(x) * 100)

        net = Twice()
        watch = Watch(net)
        watch.begin()
        x = torch.ones(2, 4)
        net(x).sum().backward()
        found = watch.end()["layer"]
        assert found.output.size == found.gradient.size == 16
        assert found.gradient.amax == pytest.approx(
            max(1.0, 100 * net.layer.weight.sum(0).abs().max().item())
        )

    def test_many_calls_under_compile(self) -> None:
        class Again(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 4, bias=False)
                nn.init.eye_(self.layer.weight)

            def forward(self, x):
                for _ in range(7):
                    x = self.layer(x)
                return x

        net = Again()
        watch = Watch(net)
        run = torch.compile(net, fullgraph=True, backend="aot_eager")
        found = []
        for _ in range(2):
            watch.begin()
            run(torch.ones(2, 4)).sum().backward()
            found.append(watch.end()["layer"].gradient)
        assert found[1].amax == 1.0
        assert found[1].size == 7 * 8

    def test_gradients_are_those_without_the_region_around(self) -> None:
        net = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
        amp.apply_policy(net, PolicyMap({"0": "fp16@2^10"}, default="float32"))
        watch = Watch(net)
        watch.begin()
        net(torch.ones(2, 4)).sum().backward()
        assert watch.end()["0.0"].gradient.amax == 1.0

    def test_only_what_the_policy_keeps_in_float32_is_a_norm(self) -> None:
        class MyNorm(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.gain = nn.Parameter(torch.ones(4))

            def forward(self, x):
                return x * self.gain

        net = nn.Sequential(nn.LayerNorm(4), MyNorm(), nn.BatchNorm1d(4))
        assert Watch(net).families == {"0": "norm", "1": None, "2": None}

    @pytest.mark.parametrize(
        ("module", "work"),
        [
            (nn.Linear(6, 3), 6.0),
            (nn.Conv2d(2, 5, 3), 18.0),
            (nn.ConvTranspose2d(2, 5, 3), 18.0),
            (nn.Embedding(9, 4), 0.0),
            (nn.EmbeddingBag(9, 4), 0.0),
            (nn.LSTM(6, 3), 4 * 9.0),
            (nn.MultiheadAttention(6, 2), 18.0),
        ],
    )
    def test_multiply_adds_an_entry_of_the_output(self, module, work) -> None:
        assert _work(module) == work

    def test_updates(self) -> None:
        net = model()
        watch = Watch(net)
        watch.begin()
        net(batches()[0][0])
        with torch.no_grad():
            for param in net.parameters():
                param.mul_(1.25)
        assert watch.end()["0"].update == pytest.approx(0.25)

    def test_a_model_is_watched_once(self) -> None:
        net = model()
        Watch(net)
        with pytest.raises(PolyampError, match="watched already"):
            Watch(net)
        with pytest.raises(PolyampError, match="no parameters"):
            Watch(nn.ReLU())

    def test_a_copy_is_not_watched(self) -> None:
        net = model()
        Watch(net)
        other = copy.deepcopy(net)
        watch = Watch(other)
        watch.begin()
        other(batches()[0][0])
        assert list(watch.end()) == ["0", "2", "3", "5"]
        watch.remove()
        assert all("forward" not in module.__dict__ for module in other.modules())


def trained(adaptive_of, net, steps: int, run=None, start: int = 0, feed=None):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = amp.GradScaler("cpu", rule="auto")
    adaptive = adaptive_of(net, scaler)
    data = feed or batches(4)
    for step in range(start, start + steps):
        x, y = data[step % len(data)]
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy((run or net)(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        adaptive.step()
    return adaptive


class TestAdaptive:
    def adaptive(self, **settings):
        return lambda net, scaler: amp.Adaptive(
            net, scaler, capabilities=CAN, **{"every": 5, **settings}
        )

    def test_a_wide_output_moves_its_module_and_no_other(self) -> None:
        net = model(gain=3e4)
        adaptive = trained(self.adaptive(), net, 12)
        choices = adaptive.selection.choices
        assert {p: c.format for p, c in choices.items()} == {
            "0": "float16",
            "2": "float32",
            "3": "bfloat16",
            "5": "float16",
        }
        assert choices["3"].statistic == "output.amax"
        assert choices["3"].value > 2.0**14
        assert adaptive.changes == 1
        seen = []
        net[3].register_forward_hook(lambda m, i, o: seen.append(i[0].dtype))
        out = net[3](torch.randn(2, 32))
        assert out.dtype == torch.float32  # outputs of a module on its own are float32
        adaptive.remove()
        assert amp.policy_tree(net).count("bfloat16") == 1

    def test_under_compile_a_change_recompiles_once(self) -> None:
        from torch._dynamo.testing import CompileCounterWithBackend

        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        net = model(gain=3e4)
        run = torch.compile(net, fullgraph=True, backend=counter)
        adaptive = trained(self.adaptive(), net, 12, run)
        assert adaptive.selection.choices["3"].format == "bfloat16"
        assert adaptive.changes == 1
        assert counter.frame_count <= 4  # two policies, each with and without statistics

    def test_resumed_is_as_if_uninterrupted(self) -> None:
        net = model(gain=3e4)
        adaptive = trained(self.adaptive(), net, 12)
        saved = json.loads(json.dumps(adaptive.to_dict()))
        other = copy.deepcopy(model(gain=3e4))
        again = amp.Adaptive(other, capabilities=CAN, every=5)
        again.from_dict(saved)
        assert again.selection == adaptive.selection
        assert again.to_dict() == saved
        assert amp.policy_tree(other) == amp.policy_tree(net).replace("NEVER CALLED", "")
        with pytest.raises(StateError, match="other modules"):
            amp.Adaptive(nn.Linear(2, 2), capabilities=CAN).from_dict(saved)
        half = Capabilities(frozenset({"float16"}))
        with pytest.raises(StateError, match="'3' was saved as bfloat16"):
            amp.Adaptive(model(gain=3e4), capabilities=half).from_dict(saved)

    def test_it_samples_the_same_steps_when_resumed(self) -> None:
        def steps(adaptive: amp.Adaptive, count: int) -> list[int]:
            sampled = []
            for _ in range(count):
                if adaptive._sampling:
                    sampled.append(adaptive.steps)
                adaptive.model(batches(1)[0][0]).sum().backward()
                adaptive.step()
            return sampled

        first = amp.Adaptive(model(), capabilities=CAN, every=10)
        assert steps(first, 15) == [0, 10]
        second = amp.Adaptive(model(), capabilities=CAN, every=10)
        second.from_dict(first.to_dict())
        assert steps(second, 15) == [20]

    def test_gradients_are_judged_again_in_the_sixth_step_after_a_skip(self) -> None:
        net = model()
        scaler = amp.GradScaler("cpu", init_scale=2.0**40)
        adaptive = amp.Adaptive(net, scaler, capabilities=CAN, every=1)
        judged, decide = [], adaptive.decide
        adaptive.decide = lambda s, gradients: judged.append(gradients) or decide(s, gradients)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for step in range(8):
            x, y = batches(1)[0]
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(net(x), y)).backward()
            scaler.step(optimizer)
            if step:
                scaler.update()
            else:
                with pytest.warns(SkippedStepWarning):
                    scaler.update(new_scale=None)
                scaler._scale.fill_(1.0)
            adaptive.step()
        assert judged == [False] * 6 + [True] * 2

    def test_bad_arguments_leave_the_model_alone(self) -> None:
        net = model()
        with pytest.raises(PolyampError, match="every must be a whole number"):
            amp.Adaptive(net, every=0)
        assert all("forward" not in module.__dict__ for module in net.modules())

    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({"selector": None}, "selector must be a Selector or a ModuleScales, got None"),
            ({"selector": Selector}, "selector must be a Selector"),
            ({"capabilities": "fp16"}, "capabilities must be polyamp.Capabilities"),
            ({"selector": ModuleScales(), "capabilities": Capabilities(shifts=False)}, "power"),
            ({"selector": ModuleScales(), "capabilities": Capabilities(frozenset())}, "float16"),
        ],
    )
    def test_after_an_error_another_can_be_made(self, changes, told) -> None:
        net = model()
        with pytest.raises(PolyampError, match=told):
            amp.Adaptive(net, **{"capabilities": CAN, **changes})
        amp.Adaptive(net, capabilities=CAN)

    def test_a_policy_of_the_users_is_not_replaced(self) -> None:
        net = amp.apply_policy(model(), "bf16")
        with pytest.raises(PolicyError, match="has a policy already"):
            amp.Adaptive(net, capabilities=CAN)
        amp.remove_policy(net)
        adaptive = amp.Adaptive(net, capabilities=CAN, every=1)
        amp.apply_policy(net, "bf16")
        with pytest.raises(PolicyError, match="changed by hand"):
            adaptive.step()

    def test_what_another_selector_saved_is_refused(self) -> None:
        saved = amp.Adaptive(model(), capabilities=CAN).to_dict()
        other = amp.Adaptive(model(), capabilities=CAN, selector=ModuleScales())
        with pytest.raises(StateError, match="saved under Selector"):
            other.from_dict(saved)

    def test_max_changes(self) -> None:
        data = [(x * 1e5, y) for x, y in batches(1)]

        def adaptive(net, scaler):
            return amp.Adaptive(net, scaler, capabilities=CAN, every=1, max_changes=1)

        with pytest.warns(UserWarning, match="formats were changed 1 times"):
            found = trained(adaptive, model(), 6, feed=data)
        assert found.changes == 1

    def test_a_skipped_step_is_followed_by_a_sample_of_the_values_alone(self) -> None:
        net = model()
        data = batches(1)
        scaler = amp.GradScaler("cpu", init_scale=2.0**40)
        adaptive = amp.Adaptive(net, scaler, capabilities=CAN, every=10**6)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

        def steps(count: int) -> None:
            for _ in range(count):
                x, y = data[0]
                optimizer.zero_grad()
                scaler.scale(nn.functional.cross_entropy(net(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
                adaptive.step()

        with pytest.warns(SkippedStepWarning):
            steps(8)
        assert {c.format for p, c in adaptive.selection.choices.items() if p != "2"} == {"float16"}
        assert adaptive.statistics


class TestCalibrate:
    def test_the_map_and_an_unchanged_model(self) -> None:
        net = model(gain=3e4)
        net.insert(5, nn.BatchNorm1d(32))
        before = copy.deepcopy(net.state_dict())
        state = torch.random.get_rng_state()
        found = amp.calibrate(net, batches(), nn.CrossEntropyLoss(), capabilities=CAN)
        assert found == PolicyMap({"3": "bf16"}, default="16-mixed")
        assert all(
            torch.equal(a, b)
            for a, b in zip(before.values(), net.state_dict().values(), strict=True)
        )
        assert torch.equal(state, torch.random.get_rng_state())
        assert all(p.grad is None for p in net.parameters())
        assert all("forward" not in module.__dict__ for module in net.modules())
        amp.apply_policy(net, found)
        assert torch.isfinite(net(batches()[0][0])).all()

    def test_without_a_criterion_values_decide(self) -> None:
        inputs = [x for x, _ in batches()]
        net = model(gain=3e4)
        assert amp.calibrate(net, inputs, capabilities=CAN) == PolicyMap(
            {"3": "bf16"}, default="16-mixed"
        )

    def test_a_policy_that_is_there_comes_back(self) -> None:
        net = amp.apply_policy(model(), "bf16")
        tree = amp.policy_tree(net)
        found = amp.advise(net, batches(), nn.CrossEntropyLoss(), capabilities=CAN)
        assert amp.policy_tree(net) == tree
        assert found.table().splitlines()[1] == "2  float32: norm computes in float32"

    def test_a_budget_takes_the_modules_that_cost_least(self) -> None:
        net = model()
        loss = nn.CrossEntropyLoss()
        for share, low in ((0.0, 0), (0.3, 1), (1.0, 3)):
            found = amp.advise(net, batches(), loss, capabilities=CAN, share=share)
            assert sum(c.level < 3 for p, c in found.choices.items() if p != "2") == low

    def test_slow_formats_are_left_out(self) -> None:
        slow = Capabilities(slow=frozenset({"float16", "bfloat16"}))
        loss = nn.CrossEntropyLoss()
        found = amp.calibrate(model(), batches(), loss, capabilities=slow)
        assert found == PolicyMap()
        wanted = Selector(prefer="memory")
        found = amp.calibrate(model(), batches(), loss, capabilities=slow, selector=wanted)
        assert found == PolicyMap(default="16-mixed")

    def test_without_a_criterion_a_share_takes_modules_too(self) -> None:
        inputs = [x for x, _ in batches()]
        found = amp.advise(model(), inputs, capabilities=CAN, share=1.0)
        assert [c.level for c in found.choices.values()] == [0, 3, 0, 0]

    def test_modules_that_only_some_batches_reach(self) -> None:
        class Either(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(16, 4), nn.Linear(16, 4)
                with torch.no_grad():
                    self.b.weight.mul_(1e6)

            def forward(self, x):
                return self.a(x) if x[0, 0] > 0 else self.b(x)

        (x, y), *_ = batches(1)
        some = [(x.abs(), y), (-x.abs(), y)]
        found = amp.advise(Either(), some, nn.CrossEntropyLoss(), capabilities=CAN)
        assert found.choices["b"].statistic == "output.amax"
        assert found.choices["b"].level >= 2

    @pytest.mark.parametrize(
        ("criterion", "told"),
        [
            (lambda out, y: 1.0, "got 1.0"),
            (lambda out, y: None, "got None"),
            (lambda out, y: out, "must give a tensor of one number"),
            (lambda out, y: (out * 0).sum().sqrt() + 1, "a gradient is not finite"),
        ],
    )
    def test_criteria_that_cannot_be_used(self, criterion, told) -> None:
        with pytest.raises(PolyampError, match=told):
            amp.calibrate(model(), batches(), criterion, capabilities=CAN)

    def test_arguments_of_another_type(self) -> None:
        loss = nn.CrossEntropyLoss()
        with pytest.raises(PolyampError, match=r"expected a torch\.nn\.Module"):
            amp.advise(lambda x: x, batches(), loss)
        with pytest.raises(PolyampError, match="selector must be"):
            amp.advise(model(), batches(), loss, capabilities=CAN, selector=None)
        with pytest.raises(PolyampError, match="none with entries"):
            amp.calibrate(model(), [torch.zeros(0, 16)], capabilities=CAN)
        with pytest.raises(PolyampError, match="no device 'nodevice'; torch has cpu"):
            amp.capabilities("nodevice")
        with pytest.raises(PolyampError, match=r"scaler must be a polyamp\.torch\.GradScaler"):
            amp.Adaptive(model(), 3.0, capabilities=CAN)

    def test_a_loss_that_is_not_finite(self) -> None:
        data = [(x * float("inf"), y) for x, y in batches()]
        with pytest.raises(PolyampError, match="calibrate on sound batches"):
            amp.calibrate(model(), data, nn.CrossEntropyLoss(), capabilities=CAN)
        with pytest.raises(PolyampError, match="no batch"):
            amp.calibrate(model(), [], nn.CrossEntropyLoss(), capabilities=CAN)
        with pytest.raises(PolyampError, match="share must be from 0 to 1"):
            amp.calibrate(model(), batches(), share=2.0)


def test_capabilities_of_the_cpu() -> None:
    found = amp.capabilities("cpu")
    assert found.formats == {"float16", "bfloat16"}
    assert found.slow <= found.formats
    assert amp.capabilities("cpu") is found


def test_two_towers() -> None:
    """By hand and by calibrate: the text tower computes in float32, the image tower in float16."""

    class Tower(nn.Module):
        def __init__(self, size: int, gain: float) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(size, 32), nn.ReLU(), nn.Linear(32, 32))
            self.out = nn.Linear(32, 8)
            with torch.no_grad():
                self.body[0].weight.mul_(gain)

        def forward(self, x):
            return nn.functional.normalize(self.out(self.body(x)), dim=-1)

    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = Tower(12, 1.0), Tower(6, 1.0)

        def forward(self, images, texts):
            return self.image(images) @ self.text(texts).T

    torch.manual_seed(0)
    net = Clip()
    rules = PolicyMap({"text": "float32"}, default="16-mixed")
    amp.apply_policy(net, rules)
    seen: dict[str, set[torch.dtype]] = {"image": set(), "text": set()}
    for tower in seen:
        for linear in (getattr(net, tower).body[0], getattr(net, tower).out):
            linear.register_forward_hook(lambda m, i, o, tower=tower: seen[tower].add(o.dtype))
    logits = net(torch.randn(5, 12), torch.randn(5, 6))
    assert seen == {"image": {torch.float16}, "text": {torch.float32}}
    assert logits.dtype == torch.float32
    assert logits.softmax(-1).dtype == torch.float32
