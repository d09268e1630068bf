"""LossScaler and gradients of every kind: absent, sparse, narrow, wide, complex, clipped."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="this is about TensorFlow")

from tensorflow_cases import (
    INF,
    NAN,
    Descent,
    applied,
    given_step,
    linear_step,
    numbers,
    tf,
    vector,
)
from tensorflow_cases import mode as mode
from tensorflow_cases import quiet as quiet

import polyamp
import polyamp.tensorflow as amp

pytestmark = pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")


class TestGradients:
    def test_absent_ones(self, mode):
        first, second, scaler = tf.Variable([1.0]), tf.Variable([2.0]), amp.LossScaler("keras")

        def step(grad):
            return scaler.apply(Descent(), [(None, first), (grad, second)])

        mode(step)(vector(2.0**15))
        assert (numbers(first), numbers(second)) == ([1.0], [1.0])

    @pytest.mark.parametrize("shape", [(2,), (1, 2)])
    def test_an_infinite_sum_whose_terms_cancel_in_another_order(self, mode, shape):
        weights, scaler = tf.Variable(tf.zeros(shape)), amp.LossScaler("keras")

        def step(terms):
            grad = tf.reshape(tf.reduce_sum(terms, 0), shape)
            return scaler.apply(Descent(), [(grad, weights)])

        assert not applied(mode(step)(vector([3e38, -3e38], [3e38, -3e38])))
        assert not np.any(numbers(weights))

    def test_none_at_all(self, mode):
        weights, scaler = tf.Variable([1.0]), amp.LossScaler("keras")
        for pairs in ([(None, weights)], []):
            with pytest.raises(ValueError, match=r"no gradient.*scaler\.scale\(loss\)"):
                mode(lambda pairs=pairs: scaler.apply(Descent(), pairs))()
        assert scaler.state == scaler.rule.init()

    @pytest.mark.parametrize("static", [True, False])
    def test_slices(self, mode, static):
        table, scaler = tf.Variable(tf.ones((4, 2))), amp.LossScaler(polyamp.Static(0.5))

        def step(values, indices):
            grad = tf.IndexedSlices(values, indices, (4, 2))
            return scaler.apply(Descent(), [(grad, table)])

        signature = [tf.TensorSpec((None, 2)), tf.TensorSpec((None,), tf.int32)]
        run = mode(step) if static else tf.function(step, input_signature=signature)
        twice = tf.constant([1, 1])
        assert not applied(run(vector([1.0, 2.0], [3.0, INF]), twice))
        assert not applied(run(vector([1e38, 0.0], [1e38, 0.0]), twice))
        assert numbers(table) == [[1.0, 1.0]] * 4
        assert applied(run(vector([0.5, 1.0], [0.5, 0.0]), twice))
        assert numbers(table) == [[1.0, 1.0], [-1.0, -1.0], [1.0, 1.0], [1.0, 1.0]]

    def test_slices_that_sum_beyond_float32(self, mode):
        table, scaler = tf.Variable(tf.zeros((4, 1))), amp.LossScaler(polyamp.Static(1.0))

        def step(values):
            return scaler.apply(Descent(), [(tf.IndexedSlices(values, [2, 2], (4, 1)), table)])

        assert not applied(mode(step)(vector([2e38], [2e38])))
        assert applied(mode(step)(vector([1e38], [1e38])))
        assert np.isfinite(table.numpy()).all()

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_narrow_variables(self, mode, dtype):
        weights, scaler = tf.Variable([1.0], dtype=dtype), amp.LossScaler(polyamp.Static(2.0**10))
        step = mode(given_step(scaler, [weights]))
        assert applied(step(vector(2.0**8, dtype=dtype)))
        assert numbers(tf.cast(weights, tf.float32)) == [0.75]
        assert applied(step(vector(2.0**-5, dtype=dtype)))
        assert not applied(step(vector(INF, dtype=dtype)))

    def test_the_unscaled_value_must_fit_the_variable(self, mode):
        weights, scaler = tf.Variable([1.0], dtype="float16"), amp.LossScaler(polyamp.Static(0.5))
        step = mode(given_step(scaler, [weights]))
        assert not applied(step(vector(40000.0)))
        assert applied(step(vector(30000.0)))
        assert numbers(weights) == [-60000.0]

    def test_wide_and_complex(self, mode):
        wide = tf.Variable([1.0], dtype="float64")
        pair = tf.Variable([1.0 + 1.0j], dtype="complex64")
        scaler = amp.LossScaler(polyamp.Static(4.0))
        step = mode(given_step(scaler, [wide, pair]))
        assert applied(step(vector(1e200, dtype=tf.float64), vector(4.0 - 8.0j, dtype="complex64")))
        assert numbers(wide) == [1.0 - 0.25e200]
        assert numbers(pair) == [3.0j]
        for bad in (complex(1.0, NAN), complex(-INF, 0.0)):
            one = vector(1.0, dtype=tf.float64)
            assert not applied(step(one, vector(bad, dtype="complex64")))

    def test_empty(self, mode):
        nothing, scaler = tf.Variable(tf.zeros((0, 3))), amp.LossScaler(polyamp.Static(2.0**-9))
        assert applied(mode(given_step(scaler, [nothing]))(tf.zeros((0, 3))))

    def test_clipping_comes_after_the_check(self, mode):
        weights, scaler = tf.Variable([0.0, 0.0]), amp.LossScaler("keras")

        def clip(grads):
            return [tf.clip_by_value(grad, -1.0, 1.0) for grad in grads]

        step = mode(linear_step(scaler, weights, transform=clip))
        assert not applied(step(vector(INF, 0.5)))
        assert applied(step(vector(30.0, 0.5)))
        assert numbers(weights) == [-1.0, -0.5]

    def test_a_transform_that_loses_one(self):
        weights, scaler = tf.Variable([0.0]), amp.LossScaler("keras")
        step = linear_step(scaler, weights, transform=lambda grads: grads[:-1])
        with pytest.raises(
            ValueError, match="each of the 1 it gets, in their order; it returned 0"
        ):
            step(vector(1.0))
        assert scaler.state == scaler.rule.init()

    def test_a_transform_that_returns_nothing(self):
        weights, scaler = tf.Variable([0.0]), amp.LossScaler("keras")
        step = linear_step(scaler, weights, transform=lambda grads: None)
        with pytest.raises(TypeError, match="got NoneType"):
            step(vector(1.0))
        assert (numbers(weights), scaler.state) == ([0.0], scaler.rule.init())

    def test_no_pairs_and_no_floats(self):
        weights, scaler = tf.Variable([1]), amp.LossScaler("keras")
        with pytest.raises(TypeError, match="pairs of gradient and variable"):
            scaler.apply(Descent(), [vector(1.0)])
        with pytest.raises(TypeError, match="must be floating or complex, got int32"):
            scaler.apply(Descent(), [(tf.constant([2**16]), weights)])
        assert (numbers(weights), scaler.state) == ([1], scaler.rule.init())


class TestScale:
    def test_dtypes(self, mode):
        scaler = amp.LossScaler()
        run = mode(scaler.scale)
        for dtype, came in (("float16", "float32"), ("bfloat16", "float32"), ("float64",) * 2):
            scaled = run(tf.constant(3.0, dtype))
            assert (float(scaled), scaled.dtype.name) == (3.0 * 2.0**16, came)

    def test_structures(self):
        scaler = amp.LossScaler(polyamp.Static(4.0))
        one, (two,) = scaler.scale((tf.constant(1.0), [2.0]))
        assert (float(one), float(two)) == (4.0, 8.0)

    def test_an_integer(self):
        with pytest.raises(TypeError, match="floating losses, got int32"):
            amp.LossScaler().scale(tf.constant(3))

    def test_unscale_to_look_at(self, mode):
        scaler = amp.LossScaler(polyamp.Static(4.0))
        grads = mode(lambda g: scaler.unscale([g, None]))(vector(2.0, dtype=tf.float16))
        assert numbers(grads[0]) == [0.5]
        assert grads[0].dtype == tf.float32
        assert grads[1] is None
