"""The demo's training loop in PyTorch: a few steps of it, and what it measures."""

from __future__ import annotations

import functools
import math
import warnings
from contextlib import nullcontext
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="these tests are about torch")

from torch import nn  # noqa: E402

import polyamp.torch as amp  # noqa: E402
from polyamp import BackendError, Policy, PolicyError, SkippedStepWarning  # noqa: E402
from polyamp.demo import Settings  # noqa: E402
from polyamp.demo.data import load  # noqa: E402
from polyamp_torch import _demo, _trainer  # noqa: E402
from polyamp_torch._demo_models import build, sinusoids  # noqa: E402

DIGITS = Settings(steps=12, batch=32, learning_rate=0.05, width=4, depth=1)
TEXT = Settings(
    steps=12, batch=8, learning_rate=1e-2, width=16, depth=1, heads=2, context=16,
    accumulate=2, max_norm=1.0,
)  # fmt: skip
SIZES = {"digits": DIGITS, "text": TEXT}


@functools.cache
def task_of(name):
    task = load(name, SIZES[name].context)
    return replace(task, held_inputs=task.held_inputs[:300], held_targets=task.held_targets[:300])


def train(name, policy, on_step=lambda step, loss: None, **changes):
    settings = replace(SIZES[name], **changes)
    return _demo.train(task_of(name), Policy.parse(policy), settings, "cpu", on_step)


@pytest.mark.parametrize("name", ["digits", "text"])
@pytest.mark.parametrize(
    "policy",
    ["float32", "mixed_float16", "mixed_bfloat16", "16-true", "bf16-true", "64-true", "O2"],
)
def test_the_loss_falls_under_every_policy(name, policy):
    seen = []
    result = train(name, policy, lambda step, loss: seen.append((step, loss)))
    assert len(result.losses) == 12
    assert seen == [(i + 1, pytest.approx(loss)) for i, loss in enumerate(result.losses)]
    start = math.log(task_of(name).classes)
    assert result.losses[0] == pytest.approx(start, rel=0.25)
    assert sum(result.losses[-3:]) / 3 < result.losses[0] - 0.2
    assert result.scale == (65536.0 if policy in ("mixed_float16", "16-true", "O2") else None)
    assert result.skipped == 0
    assert result.step_ms > 0
    assert result.memory_kind == "saved for backward"


def test_a_run_repeats_and_policies_share_weights_and_batches():
    first, again = train("text", "float32"), train("text", "no")
    assert first.losses == again.losses
    assert first.metric == again.metric
    assert train("text", "mixed_float16").losses[0] == pytest.approx(first.losses[0], rel=1e-3)
    assert train("text", "float32", seed=1).losses[0] != pytest.approx(first.losses[0], rel=1e-4)


def test_accumulating_is_the_same_as_a_larger_batch():
    one, two = train("text", "float32", accumulate=1), train("text", "float32", accumulate=2)
    assert two.losses == pytest.approx(one.losses, rel=1e-3)


def test_the_metric_beats_the_baseline_after_a_few_steps():
    digits = train("digits", "float32", steps=60)
    assert digits.metric > 0.5
    assert digits.metric * 300 == pytest.approx(round(digits.metric * 300))
    text = train("text", "float32", steps=60, batch=32)
    assert 2.0 < text.metric < task_of("text").baseline


def test_an_untrained_model_is_as_bad_as_guessing():
    text = train("text", "float32", steps=1, learning_rate=0.0)
    assert text.metric == pytest.approx(math.log2(task_of("text").classes), rel=0.15)


def test_skipped_steps_are_counted_and_the_scale_has_come_down(monkeypatch):
    def start(device, *, enabled, rule, model):
        return amp.GradScaler(device, 2.0**40, enabled=enabled)

    monkeypatch.setattr(_trainer, "GradScaler", start)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkippedStepWarning)
        result = train("digits", "mixed_float16", steps=8)
    assert result.skipped == 8
    assert result.scale == 2.0**32
    assert result.losses[0] == pytest.approx(math.log(10), rel=0.25)


def test_saved_bytes_by_hand():
    model = nn.Linear(8, 4, bias=False)
    x = torch.ones(16, 8, requires_grad=True)

    def forward():
        y = model(x)  # keeps x, and the weight, which does not count
        return (y.tanh() * y.tanh()).sum()  # keeps two results of tanh, each used twice

    assert _demo.saved_bytes(forward, model) == 4 * (16 * 8 + 2 * 16 * 4)


def test_saved_bytes_counts_a_storage_once():
    model = nn.Identity()
    x = torch.ones(4, 4, requires_grad=True)
    assert _demo.saved_bytes(lambda: (x * x.t()).sum(), model) == 64


def test_half_precision_saves_less():
    saved = {p: train("digits", p, steps=1).memory_bytes for p in ("float32", "mixed_float16")}
    assert saved["mixed_float16"] < 0.75 * saved["float32"]


def test_measuring_and_evaluating_leave_batchnorm_alone():
    task, device = task_of("digits"), torch.device("cpu")
    trainer = _demo._trainer(task, Policy.parse("float32"), DIGITS, device)
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    assert _demo._saved_for_backward(trainer, _demo._windows(task, DIGITS, device)[0][0]) > 0
    trainer.evaluate(_demo._held_out(task))
    for key, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize("fails", [False, True])
def test_one_thread_while_training_and_as_many_as_before_after_it(fails):
    threads, seen = torch.get_num_threads(), []

    def on_step(step, loss):
        seen.append(torch.get_num_threads())
        if fails:
            raise KeyboardInterrupt

    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
            train("digits", "float32", on_step, steps=2)
        assert seen == [1] * (1 if fails else 2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["digits", "text"])
def test_building_a_model_leaves_the_global_generator_alone(name):
    torch.manual_seed(7)
    state = torch.get_rng_state()
    build(task_of(name), SIZES[name])
    assert torch.equal(torch.get_rng_state(), state)


def test_sinusoids():
    table = sinusoids(5, 8)
    assert table.shape == (5, 8)
    assert table[0].tolist() == [0.0] * 4 + [1.0] * 4
    assert table[3, 0].item() == pytest.approx(math.sin(3.0))
    assert table[3, 7].item() == pytest.approx(math.cos(0.03))


def test_the_transformer_sees_only_the_past():
    model = build(task_of("text"), TEXT)
    text = torch.from_numpy(task_of("text").inputs[:1])
    changed = text.clone()
    changed[0, -1] = (changed[0, -1] + 1) % task_of("text").classes
    one, other = model(text), model(changed)
    assert torch.equal(one[0, :-1], other[0, :-1])
    assert not torch.equal(one[0, -1], other[0, -1])


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "cpu:1", "meta"])
def test_an_unknown_device_is_refused(name):
    with pytest.raises(BackendError, match=f"no device '{name}' here; choose one of: cpu"):
        _demo.device(name)


def test_the_default_device_is_the_fastest():
    found = _demo.device(None)
    assert found.accelerator == torch.cuda.is_available()
    assert _demo.device("cpu").name == "cpu"


@pytest.mark.parametrize(
    "text",
    ["float8_e4m3fn", "float32,store=float16", "p=bfloat16,c=float16"],
)
def test_a_policy_that_the_loop_cannot_follow_is_refused(text):
    with pytest.raises(PolicyError):
        _demo.check(Policy.parse(text), _demo.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_on_a_gpu(policy):
    losses = []
    result = _demo.train(
        task_of("digits"), Policy.parse(policy), DIGITS, "cuda:0", lambda _, v: losses.append(v)
    )
    assert result.memory_kind == "peak memory"
    assert result.memory_bytes > 0
    assert losses[-1] == pytest.approx(result.losses[-1])
    assert result.losses[-1] < result.losses[0]
