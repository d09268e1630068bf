"""What LossScaler says, saves and refuses."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="this is about TensorFlow")

from tensorflow_cases import (
    INF,
    NAN,
    OPTIMIZERS,
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


class TestReports:
    def test_an_eager_step_warns_where_it_is_called(self):
        step = given_step(scaler := amp.LossScaler(), [tf.Variable([1.0])])
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(11):
                step(vector(NAN))
            scaler.check()
        assert [str(w.message)[:24] for w in seen] == [
            "a step was skipped: a gr",
            "10 steps in a row were s",
        ]
        assert {w.filename for w in seen} == {given_step.__code__.co_filename}

    def test_a_graph_is_asked(self):
        step = tf.function(given_step(scaler := amp.LossScaler(), [tf.Variable([1.0])]))
        step(vector(NAN))
        step(vector(INF))
        with pytest.warns(polyamp.SkippedStepWarning, match="2 steps were skipped") as seen:
            assert scaler.get_scale() == 2.0**14
        assert seen[0].filename == __file__
        step(vector(INF))
        step(vector(INF))
        with pytest.warns(polyamp.SkippedStepWarning, match="2 steps were skipped"):
            scaler.check()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scaler.check()
        assert int(scaler.skipped) == 4
        assert float(scaler.loss_scale) == 2.0**12

    def test_a_fault(self, mode):
        scaler = amp.LossScaler(polyamp.Dynamic(max_skips_in_a_row=2))
        weights = tf.Variable([1.0])
        run = mode(given_step(scaler, [weights]))

        def step():
            run(vector(INF))
            scaler.check()

        step()
        with pytest.raises(polyamp.ScaleFloorError, match="2 steps skipped in a row") as caught:
            step()
        assert (caught.value.loss_scale, caught.value.skipped_in_a_row) == (2.0**14, 2)
        scaler.check()
        assert applied(run(vector(2.0**14)))
        assert numbers(weights) == [0.0]

    def test_the_state_cannot_be_read_in_a_graph(self):
        scaler = amp.LossScaler()
        for read in (lambda: scaler.state, scaler.check, scaler.get_scale, scaler.to_dict):
            with pytest.raises(polyamp.BackendError, match="use it outside"):
                tf.function(read, autograph=False)()


class TestSaving:
    def test_any_step_continues_as_if_uninterrupted(self, mode, tmp_path):
        rule = polyamp.Dynamic.like("nemo", init_scale=64.0, growth_interval=2, tolerance=0.25)
        slopes = [0.5, INF, 0.25, 0.125, NAN, INF, 0.5, 0.25]

        def fresh():
            weights, optimizer, scaler = (
                tf.Variable([1.0]),
                OPTIMIZERS["adam"](),
                amp.LossScaler(rule),
            )
            optimizer.build([weights])
            parts = {"weights": weights, "optimizer": optimizer, "scaler": scaler}
            return tf.train.Checkpoint(**parts), mode(linear_step(scaler, weights, optimizer))

        def seen(saver):
            return numbers(saver.weights), saver.scaler.state, saver.scaler.to_dict()

        saver, step = fresh()
        paths, rows = [], []
        for number, slope in enumerate(slopes):
            paths.append(saver.write(str(tmp_path / f"{number}")))
            step(vector(slope))
            rows.append(seen(saver))
        for start in (1, 3, 5, 6):
            saver, step = fresh()
            saver.read(paths[start]).assert_consumed()
            for number in range(start, len(slopes)):
                step(vector(slopes[number]))
                assert seen(saver) == rows[number]

    def test_restoring_is_no_news(self, tmp_path):
        scaler = amp.LossScaler()
        step = given_step(scaler, [tf.Variable([1.0])])
        step(vector(INF))
        step(vector(INF))
        path = tf.train.Checkpoint(scaler=scaler).write(str(tmp_path / "saved"))
        again, copy = amp.LossScaler(), amp.LossScaler.from_dict(scaler.to_dict())
        tf.train.Checkpoint(scaler=again).read(path).assert_consumed()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for one in (again, copy):
                one.check()
                assert one.state == scaler.state

    def test_the_portable_form(self, mode):
        scaler = amp.LossScaler(polyamp.Dynamic.like("metaseq", growth_interval=2))
        step = mode(given_step(scaler, [tf.Variable([1.0])]))
        for grad in (1.0, 1.0, INF, 1.0):
            step(vector(grad))
        text = json.dumps(scaler.to_dict())
        rule, state = polyamp.scaler_from_dict(json.loads(text))
        assert (rule, state) == (scaler.rule, scaler.state)
        assert amp.LossScaler.from_dict(json.loads(text)).to_dict() == scaler.to_dict()

    def test_not_a_saved_scaler(self):
        with pytest.raises(polyamp.StateError, match="format version"):
            amp.LossScaler.from_dict({"scale": 1.0})


class TestRefusals:
    def test_rules(self):
        assert amp.LossScaler().rule == polyamp.Dynamic()
        assert amp.LossScaler("megatron").rule == polyamp.Dynamic.like("megatron")
        with pytest.raises(polyamp.RuleError, match="megatron"):
            amp.LossScaler("megatrn")

    def test_no_optimizer(self):
        with pytest.raises(TypeError, match=r"apply_gradients, got 0\.1"):
            amp.LossScaler().apply(0.1, [(vector(1.0), tf.Variable([1.0]))])

    def test_an_optimizer_that_scales(self):
        inner = tf.keras.optimizers.SGD(1.0)
        optimizer = tf.keras.mixed_precision.LossScaleOptimizer(inner)
        weights, scaler = tf.Variable([1.0]), amp.LossScaler("keras")
        with pytest.raises(polyamp.BackendError, match="pass its inner_optimizer"):
            linear_step(scaler, weights, optimizer)(vector(1.0))
        assert applied(linear_step(scaler, weights, optimizer.inner_optimizer)(vector(0.5)))
        assert numbers(weights) == [0.5]

    def test_an_epsilon_that_is_nothing_in_float16(self):
        weights, scaler = tf.Variable([1.0], dtype="float16"), amp.LossScaler("keras")
        grad = vector(1.0, dtype=tf.float16)
        step = given_step(scaler, [weights], tf.keras.optimizers.Adam(0.1, epsilon=1e-8))
        with pytest.raises(polyamp.BackendError, match="epsilon=1e-08 of Adam is 0 in float16"):
            step(grad)
        step = given_step(scaler, [weights], tf.keras.optimizers.Adam(0.1, epsilon=1e-4))
        step(grad)
        assert np.isfinite(weights.numpy()).all()
        assert weights.numpy()[0] < 1.0
        wide = tf.Variable([1.0])
        given_step(scaler, [wide], tf.keras.optimizers.Adam(0.1, epsilon=1e-8))(vector(1.0))
        assert np.isfinite(wide.numpy()).all()
