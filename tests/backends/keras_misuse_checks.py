"""Wrong arguments, odd dtypes, broken saved state; run by test_keras_backends.py."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import keras_cases as kc
import numpy as np
import pytest
from keras import ops

import polyamp
import polyamp.keras as amp
from polyamp_keras import inspect
from polyamp_keras._ops import to_numpy

pytestmark = [
    pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
LOW = polyamp.Dynamic(init_scale=2.0**8)


def ready(**kwargs: Any) -> tuple[Any, Any]:
    """A built optimizer that knows that the loss was scaled, and its variable of one."""
    opt, var = kc.optimizer(**kwargs), keras.Variable([1.0])
    opt.build([var])
    assert float(opt.scale_loss(1.0)) == opt.initial_scale
    return opt, var


# What is wrapped.


@pytest.mark.parametrize("inner", ["adam", None, keras.optimizers.SGD])
def test_only_an_optimizer_can_be_wrapped(inner: Any) -> None:
    with pytest.raises(TypeError, match=r"must be a keras\.optimizers\.Optimizer"):
        amp.LossScaleOptimizer(inner)


@pytest.mark.parametrize("outer", [amp.LossScaleOptimizer, keras.optimizers.LossScaleOptimizer])
def test_a_scaling_optimizer_is_not_wrapped_again(outer: Callable[[Any], Any]) -> None:
    with pytest.raises(polyamp.BackendError, match="pass its inner_optimizer"):
        amp.LossScaleOptimizer(outer(keras.optimizers.SGD(1.0)))


def test_only_a_model_is_compiled() -> None:
    with pytest.raises(TypeError, match=r"takes a keras\.Model, got Dense"):
        amp.compile(keras.layers.Dense(1), "sgd", "mse")


def test_a_rule_beside_the_optimizers_own_is_refused() -> None:
    net = kc.model()
    opt = kc.optimizer(rule=LOW)
    with pytest.raises(polyamp.RuleError, match="has a rule already"):
        amp.compile(net, opt, "mse", rule="megatron")
    assert not net.compiled
    amp.compile(net, opt, "mse", rule=LOW)
    assert net.optimizer is opt


def test_a_live_wrapper_of_keras_keeps_scale_and_count() -> None:
    net = kc.model()
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), 64.0, 7)
    theirs.build(net.trainable_variables)
    theirs.dynamic_scale.assign(16.0)
    theirs.step_counter.assign(3)
    amp.compile(net, theirs, "mse")
    assert net.optimizer.state == polyamp.ScalerState(16.0, 3, 1, 0, 0, 0, 0, 0)
    theirs.dynamic_scale.assign(0.0)
    with pytest.warns(UserWarning, match="lifted to 1.17549e-38"):
        amp.compile(net, theirs, "mse")
    assert net.optimizer.state.loss_scale == 2.0**-126


def test_float16_layers_that_come_late_are_told_of() -> None:
    class Late(keras.Model):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.low = keras.layers.Dense(1, dtype="mixed_float16")
            self.low.build(shape)

        def call(self, x: Any) -> Any:
            return self.low(x)

    net = Late()
    amp.compile(net, "sgd", "mse")
    with pytest.warns(UserWarning, match="its loss is not scaled"):
        kc.fit(net, kc.data("."))
    asked = Late()
    amp.compile(asked, "sgd", "mse", rule="keras")
    kc.fit(asked, kc.data("."))
    assert asked.optimizer.state.step == 1
    declined = Late()
    amp.compile(declined, "sgd", "mse", auto_scale_loss=False)
    assert np.isfinite(kc.fit(declined, kc.data("."))["loss"][0])


def test_keras_policies_are_read() -> None:
    net = kc.model()
    amp.compile(net, "sgd", "mse", policy=keras.DTypePolicy("mixed_bfloat16"))
    assert [layer.compute_dtype for layer in net.layers] == ["bfloat16"] * 2
    made = amp.dtype_policy(keras.DTypePolicy("mixed_float16"))
    assert (type(made), made.name) == (keras.DTypePolicy, "mixed_float16")
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="mixed_float16")
    for wrong in (policies, keras.dtype_policies.QuantizedDTypePolicy("int8", "float32")):
        with pytest.raises(polyamp.PolicyError):
            amp.apply_policy(net, wrong)
    assert net.layers[0].compute_dtype == "bfloat16"


# Gradients.


def test_gradients_and_variables_must_be_as_many() -> None:
    opt, var = ready()
    one = ops.convert_to_tensor([1.0])
    with pytest.raises(ValueError, match="got 1 gradients for the 2 variables given"):
        opt.apply([one], [var, var])
    with pytest.raises(ValueError, match="No gradients"):
        opt.apply([None], [var])
    opt.apply([], [])
    assert opt.state.step == 0


def test_variables_without_a_gradient_are_left_alone() -> None:
    opt = kc.optimizer(rule=LOW)
    a, b = keras.Variable([1.0]), keras.Variable([1.0])
    assert float(opt.scale_loss(1.0)) == 2.0**8
    with pytest.warns(UserWarning, match="Gradients do not exist"):  # Keras' own
        opt.apply([None, ops.convert_to_tensor([2.0**8])], [a, b])
    assert (kc.value(a), kc.value(b)) == (1.0, 0.0)


def test_overflow_is_judged_in_the_dtype_of_the_variable() -> None:
    opt = kc.optimizer(initial_scale=1.0)
    half = keras.Variable([1.0], dtype="float16")
    assert float(opt.scale_loss(1.0)) == 1.0
    opt.apply([ops.convert_to_tensor([70000.0])], [half])
    assert (kc.value(half), opt.state.skipped) == (1.0, 1)
    opt.scale.assign(0.5)
    opt.apply([ops.convert_to_tensor([40000.0], dtype="float16")], [half])
    assert (kc.value(half), opt.state.skipped) == (1.0, 2)
    opt.apply([ops.convert_to_tensor([0.125], dtype="float16")], [half])
    assert (kc.value(half), opt.state.skipped) == (0.5, 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_variables_in_other_dtypes(dtype: str) -> None:
    if dtype == "float64" and keras.config.backend() == "jax":
        pytest.skip("JAX has no float64 unless it is switched on")
    opt, var = kc.optimizer(rule=LOW), keras.Variable([1.0], dtype=dtype)
    assert float(opt.scale_loss(1.0)) == 2.0**8
    opt.apply([ops.convert_to_tensor([2.0**7], dtype=var.dtype)], [var])
    assert float(ops.convert_to_numpy(ops.cast(var, "float32"))[0]) == 0.5
    opt.apply([ops.convert_to_tensor([kc.INF], dtype=var.dtype)], [var])
    assert (opt.state.skipped, opt.state.step) == (1, 2)


def test_complex_gradients_keep_their_imaginary_part() -> None:
    value = np.array([2.0 + 4.0j], "complex64")
    (true,) = amp.unscale([ops.convert_to_tensor(value)], 0.5)
    assert to_numpy(true).tolist() == [1 + 2j]
    for bad in (complex(0, kc.INF), complex(kc.NAN, 0)):
        grad = ops.convert_to_tensor(np.array([bad], "complex64"))
        assert not bool(inspect([grad], 1.0).finite)
    assert bool(inspect([ops.convert_to_tensor(value)], 1.0).finite)


# Saved state.


def test_a_collapsed_scale_is_lifted_and_a_broken_one_refused() -> None:
    opt, _ = ready()
    weights, place = kc.values(opt.variables), opt._place_of_scale()
    for scale, message in ((kc.NAN, "got nan"), (kc.INF, "got inf"), (-1.0, r"got -1\.0")):
        weights[place] = np.float32(scale)
        store = {str(i): w for i, w in enumerate(weights)}
        for load in (
            lambda w=weights: opt.set_weights(w),
            lambda s=store: opt.load_own_variables(s),
        ):
            with pytest.raises(polyamp.StateError, match=message):
                load()
            assert opt.state.loss_scale == 2.0**15
    weights[place] = np.float32(0.0)
    store = {str(i): w for i, w in enumerate(weights)}
    for load in (lambda: opt.set_weights(weights), lambda: opt.load_own_variables(store)):
        with pytest.warns(UserWarning, match="lifted to 1.17549e-38"):
            load()
        assert opt.state.loss_scale == 2.0**-126
        opt.scale.assign(8.0)


def test_wrong_weights_are_refused() -> None:
    opt, _ = ready()
    with pytest.raises(polyamp.StateError, match="shapes must be"):
        opt.set_weights([0.0] * (len(opt.variables) + 1))
    before = kc.values(opt.variables)
    opt.set_weights([w.item() for w in before])
    assert kc.equal(before, kc.values(opt.variables))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copied_model_goes_on_by_itself(again: Callable[[Any], Any]) -> None:
    net = kc.model(keras.layers.BatchNormalization())
    amp.compile(net, keras.optimizers.Adam(0.01), "mse", rule=LOW)
    kc.fit(net, kc.data(".x"))
    state, before = net.optimizer.state, kc.values(net.variables)
    other = again(net)
    assert other.optimizer.state == state
    amp.compile(other, other.optimizer, "mse")
    kc.fit(other, kc.data("x."))
    assert (net.optimizer.state, other.optimizer.state.step) == (state, 4)
    assert kc.equal(before, kc.values(net.variables))
    kc.fit(net, kc.data("x."))
    assert kc.equal(kc.values(other.variables), kc.values(net.variables))


def test_a_run_killed_in_an_epoch_goes_on_from_its_backup(tmp_path: Path) -> None:
    class Kill(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if int(self.model.optimizer.iterations) == 3:
                raise KeyboardInterrupt

    def run(*callbacks: Any) -> Any:
        net = kc.model(keras.layers.BatchNormalization())
        amp.compile(net, keras.optimizers.Adam(0.01), "mse", rule=LOW)
        kc.fit(net, kc.data(".x."), epochs=3, callbacks=list(callbacks))
        return net

    def backup() -> Any:
        return keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))

    with pytest.raises(KeyboardInterrupt):
        run(backup(), Kill())
    resumed, whole = run(backup()), run()
    assert resumed.optimizer.state == whole.optimizer.state
    assert whole.optimizer.state.skipped == 3
    assert kc.equal(kc.values(resumed.variables), kc.values(whole.variables))


def test_an_interrupted_save_leaves_the_file_before(tmp_path: Path) -> None:
    net = kc.model()
    amp.compile(net, "sgd", "mse", rule=LOW)
    kc.fit(net, kc.data(".x"))
    net.save(tmp_path / "model.keras")
    state = net.optimizer.state
    kc.fit(net, kc.data("x"))
    net.save(tmp_path / "later.keras")
    (tmp_path / "later.keras").write_bytes((tmp_path / "later.keras").read_bytes()[:1000])
    with pytest.raises(Exception, match=r"zip|File"):
        amp.load_model(tmp_path / "later.keras")
    assert amp.load_model(tmp_path / "model.keras").optimizer.state == state
