"""compile, fit, load_model on any Keras backend; run by test_keras_backends.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import keras_cases as kc
import numpy as np
import pytest

import polyamp
import polyamp.keras as amp

pytestmark = [
    pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
TORCH = keras.config.backend() == "torch"
LOW = polyamp.Dynamic(init_scale=2.0**8)


def ready(*layers: Any, rule: polyamp.Rule = LOW, **kwargs: Any) -> Any:
    net = kc.model(*layers)
    amp.compile(net, keras.optimizers.Adam(0.01), "mse", rule=rule, metrics=["mae"], **kwargs)
    return net


def all_of(net: Any) -> list[np.ndarray]:
    return kc.values([*net.variables, *net.optimizer.inner_optimizer.variables])


def test_a_skipped_batch_leaves_no_trace_in_fit() -> None:
    trace = ".x..n."
    layers = [lambda: keras.layers.BatchNormalization(), lambda: keras.layers.Dropout(0.5, seed=3)]
    net, without = ready(*(m() for m in layers)), ready(*(m() for m in layers))
    seen = kc.fit(net, kc.data(trace), epochs=2)
    wanted = kc.fit(without, kc.clean_part(trace), epochs=2)
    assert kc.equal(all_of(net), all_of(without))
    assert seen == wanted
    assert int(net.optimizer.iterations) == 8
    assert net.optimizer.state == kc.follow(LOW, trace * 2)
    assert np.isfinite(net.predict(kc.data("..")[0], verbose=0)).all()


def test_seeds_are_left_alone_if_asked() -> None:
    states = []
    for restore in (True, False):
        dropout = keras.layers.Dropout(0.5, seed=3)
        net = ready(dropout, restore_seeds=restore)
        kc.fit(net, kc.data(".x."))
        states.append(kc.value(dropout.seed_generator.state).tolist())
    assert [s[1] for s in states] == [2, 3]


def test_an_epoch_of_skipped_batches_has_a_nan_loss() -> None:
    net = ready()
    first = kc.fit(net, kc.data("xx"))
    assert np.isnan(first["loss"][0])
    later = kc.fit(net, kc.data(".x"))
    assert np.isfinite(later["loss"][0])


@pytest.mark.parametrize("name", kc.RULES)
def test_fit_follows_the_host(name: str) -> None:
    rule, trace = kc.RULES[name](), "..x.xx...n.x...xx.."
    net = ready(rule=rule)
    kc.fit(net, kc.data(trace))
    assert net.optimizer.state == kc.follow(rule, trace)


def test_fit_equals_fit_without_scaling() -> None:
    net, plain = ready(), kc.model()
    plain.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], auto_scale_loss=False)
    kc.fit(net, kc.data("...."), epochs=2)
    kc.fit(plain, kc.data("...."), epochs=2)
    for ours, theirs in zip(net.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-3)


def test_a_saved_model_goes_on_as_if_uninterrupted(tmp_path: Path) -> None:
    rule, trace = kc.RULES["tolerant"](), ".x.xx..."
    whole = ready(keras.layers.BatchNormalization(), rule=rule)
    kc.fit(whole, kc.data(trace))
    whole.save(tmp_path / "model.keras")
    back = amp.load_model(tmp_path / "model.keras")
    assert type(back.optimizer) is amp.LossScaleOptimizer
    assert type(back.optimizer.inner_optimizer).__name__ == "Adam"
    assert back.optimizer.state == whole.optimizer.state == kc.follow(rule, trace)
    assert kc.equal(all_of(back), all_of(whole))
    seen = [kc.fit(net, kc.data(".x...")) for net in (whole, back)]
    assert seen[0] == seen[1]
    assert kc.equal(all_of(back), all_of(whole))
    assert back.optimizer.state == whole.optimizer.state


@pytest.mark.skipif(TORCH, reason="Keras allows one step per execution on torch")
def test_several_steps_per_execution() -> None:
    trace = ".x..n."
    net = ready(keras.layers.BatchNormalization(), steps_per_execution=3)
    without = ready(keras.layers.BatchNormalization())
    kc.fit(net, kc.data(trace))
    kc.fit(without, kc.clean_part(trace))
    assert kc.equal(all_of(net), all_of(without))


def test_frozen_layers_are_not_watched() -> None:
    net = kc.model(keras.layers.BatchNormalization())
    net.layers[0].trainable = False
    amp.compile(net, "sgd", "mse")
    changing = net.train_step._changing()
    names = sorted(v.path.split("/")[-1] for v in changing)
    assert names == ["moving_mean", "moving_variance"]


def test_compiling_twice_wraps_once() -> None:
    net = ready()
    amp.compile(net, net.optimizer, "mse")
    assert type(net.train_step.original).__name__ == "method"
    assert type(net.optimizer.inner_optimizer).__name__ == "Adam"
    net.compile("sgd", "mse", auto_scale_loss=False)
    assert np.isfinite(kc.fit(net, kc.data(".."))["loss"][0])


# Where loss scaling is switched on.


def mapped() -> Any:
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="float32")
    policies["sequential_x/low"] = keras.dtype_policies.DTypePolicy("mixed_float16")
    return keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(2, name="low", dtype=policies),
            keras.layers.Dense(1),
        ],
        name="sequential_x",
    )


def plain() -> Any:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


@pytest.mark.parametrize(
    ("make", "arguments", "scaled"),
    [
        (kc.model, {}, True),
        (mapped, {}, True),
        (plain, {}, False),
        (plain, {"rule": "torch"}, True),
        (plain, {"policy": "fp16"}, True),
        (kc.model, {"policy": "bf16"}, False),
        (kc.model, {"auto_scale_loss": False}, False),
    ],
)
def test_scaling_is_on_where_it_is_needed(make: Any, arguments: Any, scaled: bool) -> None:
    net = make()
    amp.compile(net, "sgd", "mse", **arguments)
    assert isinstance(net.optimizer, keras.optimizers.LossScaleOptimizer) is scaled
    kc.fit(net, kc.data("."))
    if scaled:
        assert net.optimizer.state.step == 1


def test_a_policy_map_of_an_unbuilt_layer_is_looked_into() -> None:
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="float32")
    policies["low"] = keras.dtype_policies.DTypePolicy("mixed_float16")
    net = keras.Sequential([keras.layers.Dense(1, dtype=policies)])
    amp.compile(net, "sgd", "mse")
    assert isinstance(net.optimizer, amp.LossScaleOptimizer)


def test_keras_own_wrapper_is_replaced() -> None:
    net = kc.model()
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), 64.0, 7)
    amp.compile(net, theirs, "mse")
    want = polyamp.Dynamic.like("keras", init_scale=64.0, growth_interval=7)
    assert net.optimizer.rule == want
    assert net.optimizer.inner_optimizer is theirs.inner_optimizer


def test_a_plain_compile_takes_the_optimizer_too() -> None:
    net = kc.model(keras.layers.BatchNormalization())
    net.compile(kc.optimizer(keras.optimizers.Adam(0.01), rule=LOW), "mse")
    kc.fit(net, kc.data(".."))
    weights = kc.values(net.trainable_variables)
    kc.fit(net, kc.data("x"))
    assert kc.equal(weights, kc.values(net.trainable_variables))
    assert net.optimizer.state.skipped == 1


# Callbacks.


def test_callbacks_find_what_they_look_for() -> None:
    net = kc.model()
    amp.compile(net, keras.optimizers.SGD(0.5, use_ema=True, ema_overwrite_frequency=None), "mse")
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
        keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
    ]
    kc.fit(net, kc.data(".."), epochs=2, callbacks=callbacks)
    assert float(kc.value(net.optimizer.inner_optimizer.learning_rate)) == 0.125


def test_check_scaling_reports_an_epoch() -> None:
    net = ready()
    with pytest.warns(polyamp.SkippedStepWarning):
        seen = kc.fit(net, kc.data(".xx."), callbacks=[amp.CheckScaling()])
    assert seen["scale"] == [2.0**6]
    stubborn = ready(rule=polyamp.Dynamic(init_scale=2.0**8, max_skips_in_a_row=2))
    with pytest.raises(polyamp.ScaleFloorError):
        kc.fit(stubborn, kc.data("xx"), callbacks=[amp.CheckScaling()])
    assert stubborn.optimizer.state.fault == 0
