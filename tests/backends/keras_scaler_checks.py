"""LossScaleOptimizer in eager steps and configuration; run by test_keras_backends.py."""

from __future__ import annotations

import json
from typing import Any

import keras
import keras_cases as kc
import numpy as np
import pytest
from keras import ops

import polyamp
import polyamp.keras as amp
from polyamp_keras._ops import to_numpy

pytestmark = [
    pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


@pytest.mark.parametrize("symbol", ["x", "n"])
def test_a_skip_changes_nothing_but_the_scaler(symbol: str) -> None:
    opt = kc.optimizer(keras.optimizers.Adam(0.1, use_ema=True))
    var = keras.Variable([1.0, 2.0])
    kc.eager(opt, var, "..")
    before = kc.values([var, *opt.inner_optimizer.variables])
    assert bool(opt.last_applied)
    kc.eager(opt, var, symbol)
    assert kc.equal(before, kc.values([var, *opt.inner_optimizer.variables]))
    assert int(opt.iterations) == 2
    assert kc.value(opt.scale) == 2.0**14
    assert (int(kc.value(opt.skipped)), bool(opt.last_applied)) == (1, False)
    assert opt.state == polyamp.ScalerState(2.0**14, 0, 1, 3, 1, 1, 2, 0)


def test_weights_survive_200_bad_steps() -> None:
    opt, var = kc.optimizer(), keras.Variable([1.0, 2.0])
    kc.eager(opt, var, "x" * 200)
    assert kc.value(opt.scale) == 2.0**-126
    kc.eager(opt, var, ".", slope=2.0)
    assert kc.value(var).tolist() == [-1.0, 0.0]


def test_growth_ends_at_the_ceiling() -> None:
    rule = polyamp.Dynamic(init_scale=2.0**120, growth_interval=1)
    opt, var = kc.optimizer(rule=rule), keras.Variable([1.0])
    kc.eager(opt, var, "." * 12, slope=2.0**-20)
    assert kc.value(opt.scale) == 2.0**126
    assert kc.value(var) == np.float32(1.0 - 12 * 2.0**-20)


def test_overflow_is_judged_on_the_unscaled_value() -> None:
    opt, var = kc.optimizer(initial_scale=1e-6), keras.Variable([1.0])
    opt.build([var])
    assert float(opt.scale_loss(1.0)) == np.float32(1e-6)
    opt.apply([ops.convert_to_tensor([1e35])], [var])
    assert (kc.value(var), int(kc.value(opt.skipped))) == (1.0, 1)
    opt.apply([ops.convert_to_tensor([3e38]), ops.convert_to_tensor([3e38])][:1], [var])
    assert int(kc.value(opt.skipped)) == 2


def test_large_finite_gradients_whose_sum_overflows_are_applied() -> None:
    opt = kc.optimizer(keras.optimizers.SGD(2.0**-126), initial_scale=1.0)
    var = keras.Variable([1.0] * 4)
    grad = ops.convert_to_tensor([3e38] * 4)
    assert float(opt.scale_loss(1.0)) == 1.0
    opt.apply([grad], [var])
    assert int(kc.value(opt.skipped)) == 0
    assert kc.value(var)[0] == np.float32(1.0) - np.float32(3e38) * np.float32(2.0**-126)


@pytest.mark.parametrize("inner", ["SGD", "Adam", "RMSprop", "AdamW", "Lion"])
def test_updates_equal_those_without_scaling(inner: str) -> None:
    make = getattr(keras.optimizers, inner)
    plain, opt = make(0.1), kc.optimizer(make(0.1), initial_scale=2.0**13, dynamic_growth_steps=2)
    ours, theirs = keras.Variable([1.0, -2.0]), keras.Variable([1.0, -2.0])
    for slope in (0.1, 0.7, -0.3):
        kc.eager_step(opt, ours, slope)
        plain.apply([ops.convert_to_tensor([slope, slope])], [theirs])
    assert kc.value(ours).tolist() == kc.value(theirs).tolist()


@pytest.mark.parametrize("name", kc.RULES)
def test_eager_steps_follow_the_host(name: str) -> None:
    rule, trace = kc.RULES[name](), "..x.xx...n.x...xx.."
    opt, var = kc.optimizer(rule=rule), keras.Variable([1.0])
    kc.eager(opt, var, trace, slope=2.0**-10)
    assert opt.state == kc.follow(rule, trace)


def test_a_float16_loss_is_scaled_in_float32() -> None:
    opt = kc.optimizer()
    scaled = opt.scale_loss(ops.convert_to_tensor(2.5, dtype="float16"))
    assert not opt.built
    assert float(scaled) == 2.5 * 2.0**15
    assert keras.backend.standardize_dtype(scaled.dtype) == "float32"
    assert float(opt.get_scaled_loss(3.0)) == 3.0 * 2.0**15


def test_an_accumulation_window_has_that_many_finite_micro_batches() -> None:
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    opt, var = kc.optimizer(inner), keras.Variable([0.0])
    kc.eager_step(opt, var, 1.0)
    kc.eager_step(opt, var, 5.0, "x")
    assert (kc.value(var), int(opt.iterations)) == (0.0, 0)
    kc.eager_step(opt, var, 3.0)
    assert (kc.value(var), int(opt.iterations)) == (-2.0, 1)
    assert int(kc.value(opt.skipped)) == 1


def test_none_gradients_are_passed_over() -> None:
    opt, first, second = kc.optimizer(), keras.Variable([1.0]), keras.Variable([1.0])
    scale = float(opt.scale_loss(1.0))
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        opt.apply([None, ops.convert_to_tensor([scale])], [first, second])
    assert (kc.value(first), kc.value(second)) == (1.0, 0.0)
    before = opt.state
    with pytest.raises(ValueError, match="No gradients provided"):
        opt.apply([None, None])
    opt.apply([])
    assert opt.state == before


def test_gradients_are_not_changed() -> None:
    opt, var = kc.optimizer(), keras.Variable([1.0, 1.0])
    grads = [ops.convert_to_tensor([opt.initial_scale, 0.0])]
    opt.apply(grads, [var])
    opt.apply(grads)
    assert np.array(grads[0]).tolist() == [2.0**15, 0.0]
    assert kc.value(var).tolist() == [-1.0, 1.0]
    assert np.array(opt.unscale(grads)[0]).tolist() == [1.0, 0.0]


@pytest.mark.skipif(keras.config.backend() != "torch", reason="only torch variables have .grad")
def test_the_variables_own_gradients_are_unscaled_in_place() -> None:
    opt, var = kc.optimizer(), keras.Variable([1.0, 1.0])
    opt.scale_loss(ops.sum(var * 0.5)).backward()
    grad = var.value.grad
    opt.apply([grad], [var])
    assert (kc.value(var).tolist(), grad.tolist()) == ([0.5, 0.5], [0.5, 0.5])
    grad.copy_(ops.convert_to_tensor([kc.INF, 8.0]))
    opt.apply([grad], [var])
    assert (kc.value(var).tolist(), grad.tolist()) == ([0.5, 0.5], [kc.INF, 8.0])


def test_a_variable_that_takes_its_gradient_as_value_is_not_unscaled() -> None:
    opt, weight, amax = kc.optimizer(), keras.Variable([1.0]), keras.Variable([0.0])
    amax.overwrite_with_gradient = True
    scale = opt.initial_scale
    grads = [ops.convert_to_tensor([scale]), ops.convert_to_tensor([7.0])]
    opt.apply(grads, [weight, amax])
    assert (kc.value(weight), kc.value(amax)) == (0.0, 7.0)
    opt.apply([grads[0], ops.convert_to_tensor([kc.INF])])
    assert (kc.value(weight), kc.value(amax)) == (0.0, 7.0)


@pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")
def test_a_rule_that_wants_the_range_gets_it() -> None:
    rule = polyamp.Predictive(sub_interval=2)
    opt, var, want = kc.optimizer(rule=rule), keras.Variable([0.0] * 3), rule.init()
    opt.scale_loss(ops.convert_to_tensor(1.0))
    for number, top in enumerate((3.0, -700.0, kc.INF, 0.25, 1e-3)):
        opt.apply([ops.convert_to_tensor([0.0, top, -1e-5])], [var])
        share = 0.5 if number % 2 == 0 else -1.0
        signal = polyamp.Signal(top < kc.INF, True, polyamp.host.c(abs(top), "f32"), share)
        want = polyamp.transition(rule, want, signal)
        assert opt.state == want


def test_learning_rate_and_iterations_are_the_inner_optimizers() -> None:
    opt = kc.optimizer(keras.optimizers.Adam(0.5))
    opt.learning_rate = 0.25
    assert float(kc.value(opt.inner_optimizer.learning_rate)) == 0.25
    assert opt.iterations is opt.inner_optimizer.iterations
    var = keras.Variable([1.0])
    pair = (ops.convert_to_tensor([opt.initial_scale]), var)
    assert int(opt.apply_gradients([pair])) == 1


def test_forgetting_to_scale_is_told_once() -> None:
    opt, var = kc.optimizer(), keras.Variable([1.0])
    grads = [ops.convert_to_tensor([1.0])]
    with pytest.warns(UserWarning, match=r"scale_loss\(loss\)"):
        opt.apply(grads, [var])
    opt.apply(grads, [var])
    assert int(opt.iterations) == 2


def test_skips_are_told() -> None:
    opt, var = kc.optimizer(), keras.Variable([1.0])
    with pytest.warns(polyamp.SkippedStepWarning, match="a step was skipped.*16384"):
        kc.eager(opt, var, "x")


def test_a_rule_that_gives_up_raises_and_stays_usable() -> None:
    opt = kc.optimizer(rule=polyamp.Dynamic(max_skips_in_a_row=2))
    var = keras.Variable([1.0])
    with pytest.raises(polyamp.ScaleFloorError, match="max_skips_in_a_row"):
        kc.eager(opt, var, "xxx")
    assert opt.state[3:8] == (2, 2, 2, 2, 0)
    kc.eager(opt, var, ".", slope=0.5)
    assert kc.value(var) == 0.5


def test_an_epsilon_of_zero_in_float16_is_refused() -> None:
    half = keras.Variable([1.0, 0.0], dtype="float16")
    with pytest.raises(polyamp.PolicyError, match="zero in float16"):
        kc.optimizer(keras.optimizers.Adam(0.1, epsilon=1e-8)).build([half])
    opt = kc.optimizer(keras.optimizers.Adam(2.0**-6, epsilon=1e-4), initial_scale=8.0)
    assert float(opt.scale_loss(1.0)) == 8.0
    for _ in range(3):
        opt.apply([ops.convert_to_tensor([8.0, 0.0], dtype="float16")], [half])
    assert np.isfinite(kc.value(half)).all()
    assert kc.value(half)[1] == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "megatron", "initial_scale": 2.0}, "initial_scale"),
        ({"rule": "megatorn"}, "did you mean 'megatron'"),
        ({"initial_scale": 0.0}, "init_scale"),
        ({"dynamic_growth_steps": 0}, "growth_interval"),
        ({"initial_scale": NotImplemented}, "init_scale"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(polyamp.RuleError, match=message):
        kc.optimizer(**arguments)


def test_keras_errors_come_through() -> None:
    with pytest.raises(ValueError, match="does not support `clipnorm`"):
        kc.optimizer(clipnorm=1.0)
    with pytest.raises(ValueError, match="needs a built optimizer"):
        kc.optimizer().apply([ops.convert_to_tensor([1.0])])
    opt = kc.optimizer()
    opt.build([keras.Variable([1.0])])
    with pytest.raises(ValueError, match="got 2 gradients for the 1"):
        opt.apply([ops.convert_to_tensor([1.0])] * 2)


def test_keras_numbers_can_be_set_later() -> None:
    opt, var = kc.optimizer(), keras.Variable([1.0])
    opt.dynamic_growth_steps = 2
    kc.eager(opt, var, "..")
    assert (opt.rule, kc.value(opt.scale)) == (
        polyamp.Dynamic.like("keras", growth_interval=2),
        2.0**16,
    )
    with pytest.raises(polyamp.RuleError, match="has no growth_interval"):
        kc.optimizer(rule="static").dynamic_growth_steps = 3


# Saving.


def test_the_config_is_json_and_comes_back_without_custom_objects() -> None:
    for arguments in ({}, {"initial_scale": 8.0}, {"rule": "megatron"}, {"rule": "static"}):
        opt = kc.optimizer(keras.optimizers.Adam(0.5, weight_decay=0.1), **arguments)
        saved = json.loads(json.dumps(keras.saving.serialize_keras_object(opt)))
        back = keras.saving.deserialize_keras_object(saved)
        assert (type(back), back.rule, back.name) == (amp.LossScaleOptimizer, opt.rule, opt.name)
        assert back.get_config() == opt.get_config()
        assert back.inner_optimizer.weight_decay == 0.1


def test_keras_own_config_is_understood() -> None:
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), 64.0, 7)
    ours = amp.LossScaleOptimizer.from_config(theirs.get_config())
    assert ours.rule == polyamp.Dynamic.like("keras", init_scale=64.0, growth_interval=7)
    assert isinstance(ours, keras.optimizers.LossScaleOptimizer)


def test_weights_hold_everything() -> None:
    rule = kc.RULES["tolerant"]()
    first, a = kc.optimizer(keras.optimizers.Adam(0.1), rule=rule), keras.Variable([1.0])
    kc.eager(first, a, "..x.x")
    second, b = kc.optimizer(keras.optimizers.Adam(0.1), rule=rule), keras.Variable(kc.value(a))
    second.build([b])
    second.set_weights(kc.values(first.variables))
    for opt, var in ((first, a), (second, b)):
        kc.eager(opt, var, ".xx..")
    assert kc.value(a) == kc.value(b)
    assert second.state == first.state == kc.follow(rule, "..x.x.xx..")
    before = kc.values(second.variables)
    with pytest.raises(polyamp.StateError, match="shapes must be"):
        second.set_weights(before[:-1])
    assert kc.equal(before, kc.values(second.variables))


def test_portable_state_goes_on_in_another_optimizer() -> None:
    rule = polyamp.Dynamic(init_scale=64.0, growth_interval=2, hysteresis=2)
    state = kc.follow(rule, ".x")
    opt = amp.LossScaleOptimizer.from_dict(
        json.loads(json.dumps(polyamp.scaler_to_dict(rule, state))), keras.optimizers.SGD(1.0)
    )
    assert (opt.rule, opt.state) == (rule, state)
    kc.eager(opt, keras.Variable([1.0]), "x..x")
    assert polyamp.scaler_from_dict(opt.to_dict()) == (rule, kc.follow(rule, ".xx..x"))


# The stateless interface.


@pytest.mark.skipif(
    keras.config.backend() == "tensorflow", reason="Keras has no stateless_apply on TensorFlow"
)
def test_stateless_apply_changes_no_argument() -> None:
    opt, var = kc.optimizer(keras.optimizers.SGD(1.0, momentum=0.5)), keras.Variable([1.0, 2.0])
    opt.build([var])
    before = kc.values([var, *opt.variables])
    state, weights = list(opt.variables), [var]
    grads = [ops.convert_to_tensor([opt.initial_scale] * 2)]
    (once,), state = opt.stateless_apply(state, grads, weights)
    assert kc.equal(before, kc.values([var, *opt.variables]))
    kept, kept_state = np.array(to_numpy(once)), [np.array(to_numpy(s)) for s in state]
    (twice,), later = opt.stateless_apply(state, grads, [once])
    assert kept.tolist() == to_numpy(once).tolist() == [0.0, 1.0]
    assert kc.equal(kept_state, [np.array(to_numpy(s)) for s in state])
    assert to_numpy(twice).tolist() == [-1.5, -0.5]
    bad = [grads[0] * kc.INF]
    (third,), _ = opt.stateless_apply(later, bad, [twice])
    assert to_numpy(third).tolist() == [-1.5, -0.5]
    assert float(opt.stateless_scale_loss(later, 2.0)) == 2.0**16
