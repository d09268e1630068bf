"""Policies, master weights and Trainer on an accelerator."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="these tests are about torch on an accelerator")

import polyamp  # noqa: E402
import polyamp.torch as amp  # noqa: E402

pytestmark = pytest.mark.gpu

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(16, 16)
        self.norm = torch.nn.RMSNorm(16)
        self.head = torch.nn.Linear(16, 4)
        self.seen: dict[str, object] = {}

    def forward(self, x):
        hidden = self.body(x)
        weights = hidden.softmax(-1)
        if not torch.compiler.is_compiling():
            self.seen = {"body": hidden.dtype, "softmax": weights.dtype}
        return self.head(self.norm(hidden + weights))


def net() -> Net:
    torch.manual_seed(0)
    return Net().cuda()


@pytest.mark.parametrize(("policy", "low"), [("fp16", F16), ("bf16", BF16), ("O2", F16)])
def test_dtypes_inside(policy, low) -> None:
    model = amp.apply_policy(net(), polyamp.PolicyMap({"head": "float32"}, default=policy))
    out = model(torch.randn(8, 16, device="cuda"))
    assert model.seen == {"body": low, "softmax": F32}
    assert out.dtype == F32


def test_lengths_on_the_cpu_do_not_move_autocast() -> None:
    class Lengths(Net):
        def forward(self, lengths, x):
            return super().forward(x)

    torch.manual_seed(0)
    model = amp.apply_policy(Lengths().cuda(), "bf16")
    model(torch.tensor([3]), torch.randn(8, 16, device="cuda"))
    assert model.seen["body"] == BF16


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_is_close_to_eager(backend, fresh_compiler) -> None:
    model = amp.apply_policy(net(), polyamp.PolicyMap({"head": "float32"}, default="bf16"))
    x = torch.randn(8, 16, device="cuda")
    eager = model(x)
    compiled = torch.compile(model, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(compiled, eager, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("policy", ["fp16", "bf16", "O2", "16-true", "bf16-true"])
def test_trainer(policy, fused) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=fused)
    if policy == "bf16-true":
        optimizer = amp.MasterWeights(optimizer)
    trainer = amp.Trainer(
        model, optimizer, torch.nn.CrossEntropyLoss(), policy=policy, max_norm=1.0,
        accumulation_steps=2, ema_decay=0.9, progress=False,
    )  # fmt: skip
    x = torch.randn(64, 16)
    data = list(zip(x.split(16), x[:, :4].argmax(1).split(16), strict=True))
    history = trainer.train(data, 20, val_dataloader=data)
    assert history["loss"].iloc[-1] < 0.5 * history["loss"].iloc[0]
    assert history["grad_norm"].iloc[-1] > 0.0
    assert history["val_CrossEntropyLoss"].iloc[-1] < history["val_CrossEntropyLoss"].iloc[0]


def test_a_bad_window_is_skipped_whole() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = amp.Trainer(
        model, optimizer, torch.nn.MSELoss(), fp16=True, rule=polyamp.Dynamic(init_scale=256.0),
        accumulation_steps=2, progress=False,
    )  # fmt: skip
    good, bad = torch.randn(4, 16), torch.full((4, 16), float("nan"))
    target = torch.zeros(4, 4)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.warns(polyamp.SkippedStepWarning):
        history = trainer.train([(good, target), (bad, target)], 1)
    assert (history["skipped"].item(), history["scale"].item()) == (1, 128.0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
