"""The demo and the bench in Keras, on any Keras backend; run by test_keras_backends.py."""

from __future__ import annotations

import functools
import io
import json
import math
from dataclasses import replace
from typing import Any

import keras
import keras_cases as kc
import numpy as np
import pytest

import polyamp.keras as amp
from polyamp import BackendError, Dynamic, Policy, PolicyError, bench
from polyamp.bench.report import Row
from polyamp.demo import Settings, Task
from polyamp.demo.data import load
from polyamp_keras import _bench, _bench_selector, _demo, _demo_models

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
FRAMEWORK = keras.config.backend()
ONCE = pytest.mark.skipif(
    FRAMEWORK != "torch", reason="the same on every Keras backend, and quickest on torch"
)
MODE = next(mode for mode in _bench.LIMITS if mode.startswith(FRAMEWORK))
DIGITS = Settings(steps=10, batch=32, learning_rate=0.05, width=4, depth=1)
TEXT = Settings(
    steps=10, batch=8, learning_rate=1e-2, width=16, depth=1, heads=2, context=16,
    accumulate=2, max_norm=1.0,
)  # fmt: skip
SIZES = {"digits": DIGITS, "text": TEXT}


@functools.cache
def task_of(name: str) -> Task:
    task = load(name, SIZES[name].context)
    return replace(task, held_inputs=task.held_inputs[:300], held_targets=task.held_targets[:300])


def train(name: str, policy: str, on_step: Any = lambda *step: None, **changes: Any) -> Any:
    settings = replace(SIZES[name], **changes)
    return _demo.train_here(task_of(name), Policy.parse(policy), settings, on_step)


# The models.


def test_the_transformer_does_not_look_ahead() -> None:
    model = _demo_models.build(task_of("text"), TEXT)
    text = np.array(task_of("text").inputs[:2], "int32")
    later = text.copy()
    later[:, 9:] = 1
    one, two = (model.predict(t, verbose=0) for t in (text, later))
    assert one.shape == (2, 16, task_of("text").classes)
    np.testing.assert_allclose(one[:, :9], two[:, :9], atol=1e-6)
    assert np.abs(one[:, 9:] - two[:, 9:]).max() > 1e-3


def test_parameters_by_hand() -> None:
    classes, c, w = task_of("text").classes, 16, 16
    layer = 2 * 2 * w + (3 * w * w + 3 * w) + (w * w + w) + (4 * w * w + 4 * w) + (4 * w * w + w)
    want = classes * w + c * w + layer + 2 * w + (w + 1) * classes
    assert _demo_models.build(task_of("text"), TEXT).count_params() == want


def test_models_follow_the_policy_all_through() -> None:
    model = amp.apply_policy(_demo_models.build(task_of("text"), TEXT), "mixed_float16")
    layers = [x for x in model._flatten_layers() if not isinstance(x, keras.layers.InputLayer)]
    assert {x.compute_dtype for x in layers} == {"float16"}
    assert {v.dtype for v in model.trainable_variables} == {"float32"}


# Training.


@pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")
@pytest.mark.parametrize(
    ("name", "policy"),
    [("digits", "mixed_float16"), ("text", "mixed_float16"), ("text", "mixed_bfloat16")],
)
def test_the_loss_falls(name: str, policy: str) -> None:
    seen: list[Any] = []
    result = train(name, policy, lambda *step: seen.append(step))
    assert repr(seen) == repr([(i + 1, loss) for i, loss in enumerate(result.losses)])
    assert len(result.losses) == 10
    first = result.losses[result.skipped]  # the first batches may be skipped: NaN
    assert [math.isnan(loss) for loss in result.losses[: result.skipped]] == [True] * result.skipped
    assert first == pytest.approx(math.log(task_of(name).classes), rel=0.3)
    assert result.losses[-1] < first - 0.2
    assert result.skipped <= 2
    assert result.scale == (2.0 ** (15 - result.skipped) if policy == "mixed_float16" else None)
    assert result.step_ms > 0
    assert result.memory_kind == "all variables"


@ONCE
def test_accumulating_is_a_larger_batch_and_policies_share_weights_and_batches() -> None:
    two, one = train("text", "float32", steps=5), train("text", "float32", steps=5, accumulate=1)
    assert two.losses == pytest.approx(one.losses, rel=1e-3)
    low = train("text", "mixed_bfloat16", steps=1)
    assert low.losses[0] == pytest.approx(two.losses[0], rel=1e-2)
    assert low.losses[0] != two.losses[0]


@pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")
def test_skips_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    compile = amp.compile
    rule = Dynamic(init_scale=2.0**40, min_scale=2.0**38)
    monkeypatch.setattr(amp, "compile", functools.partial(compile, rule=rule))
    result = train("digits", "mixed_float16", steps=4)
    assert (result.skipped, result.scale) == (4, 2.0**38)
    assert all(math.isnan(loss) for loss in result.losses)


def test_the_learning_rate_by_hand() -> None:
    schedule = _demo.Schedule(replace(TEXT, steps=40, learning_rate=2.0))
    rates = [float(schedule(keras.ops.convert_to_tensor(i))) for i in (0, 1, 2, 40, 79)]
    cosine = 0.5 + 0.5 * math.cos(math.pi * 39 / 40)
    want = [1.0, 1.0, 1.0 + math.cos(math.pi / 40), 1.0, 2.0 * cosine]
    assert rates == pytest.approx(want, rel=1e-4)


def test_bytes_and_metric_by_hand() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(1.0, momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    model.set_weights([np.zeros((3, 2)), np.array([0.0, math.log(3.0)])])
    iterations = 8 if FRAMEWORK == "tensorflow" else 4
    assert _demo.variable_bytes(model) == 4 * 2 * 8 + 4 + iterations  # momenta; learning rate
    x, y = np.zeros((4, 3), "float32"), np.array([1, 1, 1, 0])
    bits = replace(task_of("text"), held_inputs=x, held_targets=y)
    assert _demo.evaluate(replace(bits, metric="accuracy"), model) == 0.75
    assert _demo.evaluate(bits, model) == pytest.approx(2.0 - 0.75 * math.log2(3.0))


# The demo's process and that of the training.


@pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")
def test_a_training_elsewhere_is_the_same() -> None:
    seen: list[Any] = []
    settings = replace(DIGITS, steps=2)
    policy, variant = Policy.parse("mixed_float16"), _demo.OnFramework(FRAMEWORK)
    away = variant.train(
        task_of("digits"), policy, settings, "cpu", lambda *step: seen.append(step)
    )
    here = train("digits", "mixed_float16", steps=2)
    assert away.losses == pytest.approx(here.losses, rel=1e-3, nan_ok=True)
    assert replace(away, losses=(), step_ms=0) == replace(
        here, losses=(), step_ms=0, metric=away.metric
    )
    assert away.metric == pytest.approx(here.metric, abs=0.02)
    assert repr(seen) == repr([(1, away.losses[0]), (2, away.losses[1])])


@ONCE
@pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")
def test_fit_draws_its_own_bar_on_a_terminal() -> None:
    screen, seen = io.StringIO(), list[Any]()
    _demo.OnFramework(FRAMEWORK).train(
        task_of("text"),
        Policy.parse("float32"),
        replace(TEXT, steps=2),
        "cpu",
        lambda *step: seen.append(step),
        screen,
    )
    assert len(seen) == 2
    assert "4/4" in screen.getvalue()
    assert "batch_loss: " in screen.getvalue()


def test_a_training_that_fails_says_why() -> None:
    variant = _demo.OnFramework("numpy")
    with pytest.raises(BackendError, match=r"(?s)Keras on numpy failed.*does not train"):
        variant.train(task_of("digits"), Policy.parse("no"), DIGITS, "cpu", lambda *step: None)


@pytest.mark.parametrize("policy", ["16-true", "float64", "O2"])
def test_other_policies_are_refused(policy: str) -> None:
    variant = _demo.OnFramework(FRAMEWORK)
    with pytest.raises(PolicyError, match=r"[kK]eras"):
        variant.check(Policy.parse(policy), variant.device("cpu"))


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[str] = ["cpu", "gpu:0", "gpu:1"]
    monkeypatch.setattr(_demo, "in_fresh_python", lambda *arguments, env: known)
    variant = _demo.OnFramework(FRAMEWORK)
    names = [variant.device(name).name for name in (None, "cuda", "cuda:1", "gpu:1", "cpu")]
    assert names == ["gpu:0", "gpu:0", "gpu:1", "gpu:1", "cpu"]
    assert [variant.device(name).accelerator for name in (None, "cpu")] == [True, False]
    with pytest.raises(BackendError, match="no device 'tpu' here; choose one of: cpu, gpu:0"):
        variant.device("tpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert variant._environment("gpu:1")["CUDA_VISIBLE_DEVICES"] == "6"
    assert variant._environment("cpu")["CUDA_VISIBLE_DEVICES"] == "-1"
    del known[1:]
    assert variant.device(None).name == "cpu"
    with pytest.raises(BackendError, match=r"no device 'cuda' here; choose one of: cpu$"):
        variant.device("cuda")


def test_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(_demo.variants()) == [FRAMEWORK]
    assert {"keras", FRAMEWORK} == _demo.variants()[FRAMEWORK].versions().keys()
    monkeypatch.delenv("KERAS_BACKEND")
    assert FRAMEWORK in _demo.variants()


# The bench.


def test_every_way_trains_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bench, "STEPS", 3)
    ends = []
    for way in _bench.WAYS:
        model, run = _bench.trained(f"{MODE} adam", way, (6, 5, 3))
        assert run() > 0.0
        assert int(model.optimizer.iterations) == 4
        ends.append(kc.values(model.trainable_variables))
    for end in ends[1:]:
        for ours, plain in zip(end, ends[0], strict=True):
            np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-6)
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer


def test_selector_bench_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bench_selector, "EVERY", 2)
    kind = next(kind for kind in _bench_selector.kinds() if kind.startswith(FRAMEWORK))
    rows = _bench_selector.measure(kind, 3, (6, 5, 3))
    assert [row.name for row in rows][:2] == [f"{kind}, step", f"{kind}, ratio"]
    assert all(row.value > 0 for row in rows[:4])
    assert rows[1].limit == 1.02


def test_bench_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bench, "STEPS", 2)
    rows = _bench.measure(f"{MODE} sgd", 3, (6, 5, 3))
    limit = {"torch": 1.06, "tensorflow": 1.03, "jax": 1.10}[FRAMEWORK]
    ends = ["time", "ratio", "ratio, low", "ratio, high", "own ratio"]
    assert [r.name for r in rows] == [f"{MODE} sgd {end}" for end in ends]
    assert [r.limit for r in rows] == [None, limit, None, None, None]
    assert 0.0 < rows[2].value <= rows[1].value <= rows[3].value


def test_the_perceptron_has_the_size_that_is_told() -> None:
    assert _bench.perceptron().count_params() == 1_863_690


def test_each_kind_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    def fresh(*arguments: str, env: Any) -> Any:
        calls.append((arguments[2], env["KERAS_BACKEND"]))
        return [Row("x", 1.0, "ms").__dict__]

    monkeypatch.setattr(_bench, "in_fresh_python", fresh)
    found = bench.BENCHES["keras-step"].load()(True, lambda text: None)
    assert calls == [(kind, kind.split()[0]) for kind in _bench.kinds()]
    assert f"{MODE} adam" in _bench.kinds()
    assert len(found.rows) == len(calls)
    assert {"python", "keras", FRAMEWORK, "polyamp"} <= set(found.versions)
    monkeypatch.setattr(_bench, "measure", lambda kind, rounds: [Row(kind, rounds, "ms")])
    _bench._main("torch eager sgd", "2")
    assert [Row(**r) for r in json.loads(capsys.readouterr().out)] == [
        Row("torch eager sgd", 2, "ms")
    ]
