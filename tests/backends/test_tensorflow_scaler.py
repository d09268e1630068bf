"""LossScaler in GradientTape loops: eager, in tf.function and under XLA."""

from __future__ import annotations

import json
import logging
import random
import warnings

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="this is about TensorFlow")

from tensorflow_cases import (
    INF,
    MODES,
    NAN,
    OPTIMIZERS,
    Descent,
    applied,
    given_step,
    linear_step,
    numbers,
    tf,
)

import polyamp
import polyamp.tensorflow as amp
import polyamp_tensorflow
from polyamp.bench.core import FiveMemory

pytestmark = pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")


@pytest.fixture(params=MODES)
def mode(request):
    """How a step is run."""
    return MODES[request.param]


@pytest.fixture(autouse=True)
def _quiet():
    """Neither autograph nor retracing has anything to complain of."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    handler.addFilter(lambda record: "retracing" not in record.msg)  # counts functions by name
    loggers = [tf.get_logger(), logging.getLogger("absl")]
    for logger in loggers:
        logger.addHandler(handler)
    yield
    for logger in loggers:
        logger.removeHandler(handler)
    assert said == []


def vector(*values, dtype=tf.float32):
    return tf.constant(values, dtype)


class TestRightValues:
    def test_two_hundred_bad_steps_then_a_good_one(self, mode):
        weights, scaler = tf.Variable([1.0, 2.0]), amp.LossScaler()
        step = mode(linear_step(scaler, weights))
        for _ in range(200):
            step(vector(INF, 1.0))
        assert scaler.state.loss_scale == 2.0**-126
        assert numbers(weights) == [1.0, 2.0]
        assert applied(step(vector(2.0, 4.0)))  # smaller ones are subnormal at this scale
        assert numbers(weights) == [-1.0, -2.0]

    @pytest.mark.parametrize("rule", ["torch", "dynamic"])
    def test_twelve_growths_from_far_up(self, mode, rule):
        start = {"init_scale": 2.0**120, "growth_interval": 1}
        rule = (
            polyamp.Dynamic.like("torch", **start) if rule == "torch" else polyamp.Dynamic(**start)
        )
        weights, scaler = tf.Variable([0.0]), amp.LossScaler(rule)
        step = mode(linear_step(scaler, weights))
        for count in range(1, 13):
            step(vector(0.5))
            assert numbers(weights) == [-0.5 * count]
        assert scaler.state.loss_scale == (2.0**127 if rule.max_scale > 2.0**126 else 2.0**126)

    def test_the_update_uses_the_scale_that_the_loss_had(self, mode):
        weights, scaler = tf.Variable([0.0]), amp.LossScaler(polyamp.Dynamic(growth_interval=1))
        step = mode(linear_step(scaler, weights))
        seen = []
        for _ in range(3):
            made = step(vector(1.0))
            seen.append((numbers(weights), float(made.scale_used), float(made.next_scale)))
        assert seen == [
            ([-1.0], 2.0**16, 2.0**17),
            ([-2.0], 2.0**17, 2.0**18),
            ([-3.0], 2.0**18, 2.0**19),
        ]

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    def test_one_bad_entry_in_a_large_array(self, mode, bad):
        dice = random.Random(1)
        weights, scaler = tf.Variable(tf.zeros((512, 512))), amp.LossScaler("keras")
        step = mode(given_step(scaler, [weights]))
        for _ in range(5):
            grad = np.random.default_rng(dice.randrange(99)).normal(size=(512, 512)) * 100
            grad = grad.astype(np.float32)
            assert applied(step(tf.constant(grad)))
            before = weights.numpy()
            grad[dice.randrange(512), dice.randrange(512)] = bad
            assert not applied(step(tf.constant(grad)))
            assert np.array_equal(weights.numpy(), before)

    def test_large_finite_gradients_are_no_overflow(self, mode):
        weights, scaler = tf.Variable(tf.zeros(4)), amp.LossScaler(polyamp.Static(2.0**40))
        step = mode(given_step(scaler, [weights]))
        assert applied(step(vector(3e38, 3e38, -3e38, 3e38)))
        assert numbers(weights)[0] == -np.float32(3e38) / np.float32(2.0**40)

    def test_the_unscaled_value_is_judged(self, mode):
        weights, scaler = tf.Variable([0.0]), amp.LossScaler(polyamp.Static(2.0**-20))
        step = mode(given_step(scaler, [weights]))
        assert not applied(step(vector(1e35)))
        assert applied(step(vector(1e20)))
        assert numbers(weights) == [-np.float32(1e20) * 2.0**20]


RULES = [
    polyamp.Dynamic(init_scale=2.0**10, growth_interval=4, growth_factor=1.5, backoff_factor=0.75),
    polyamp.Dynamic.like("nemo", init_scale=64.0, growth_interval=3, tolerance=0.25),
    polyamp.Dynamic.like("metaseq", growth_interval=2, max_skips_in_a_row=3),
    polyamp.Static(512.0),
]


class TestTraces:
    @pytest.mark.parametrize(
        "rule", RULES, ids=lambda rule: f"{type(rule).__name__}{len(rule.init().memory)}"
    )
    @pytest.mark.parametrize("jit", [False, True], ids=["graph", "xla"])
    def test_ten_thousand_steps_equal_the_hosts(self, rule, jit):
        dice = random.Random(7)
        good = [dice.random() > 0.07 for _ in range(10_000)]
        scales, counts = run_in_graph(rule, good, jit)
        state, step = rule.init(), polyamp.bind(rule)
        for number, finite in enumerate(good):
            state = step(state, polyamp.Signal(finite))
            assert scales[number] == state.loss_scale, number
            assert counts[number] == [*state[1:-1], *state.memory], number

    def test_a_rule_that_wants_amax_gets_it(self, mode):
        class Wanting(FiveMemory):
            wants_amax = True

        rule = Wanting()
        weights, scaler = tf.Variable(tf.zeros(3)), amp.LossScaler(rule)
        step, want = mode(given_step(scaler, [weights])), rule.init()
        for top in (3.0, -700.0, INF, 0.25, 1e-3):
            step(vector(0.0, top, -1e-4))
            signal = polyamp.Signal(top < INF, amax=float(np.float32(abs(top))))
            want = polyamp.transition(rule, want, signal)
            assert scaler.state == want


def run_in_graph(rule, good, jit):
    """Scales and counts after each step, a `tf.while_loop` driving the bound transition."""
    xp = polyamp_tensorflow.xp

    @tf.function(jit_compile=jit, autograph=False)
    def run(flags):
        step = polyamp.bind(rule, xp)
        steps = flags.shape[0]
        state = rule.init(xp)
        width = len(state) - 2 + len(state.memory)
        scales, counts = tf.zeros(steps), tf.zeros((steps, width), tf.int32)

        def more(number, *_):
            return number < steps

        def body(number, state, scales, counts):
            state = step(state, polyamp.Signal(flags[number]))
            row = tf.stack([*state[1:-1], *state.memory])
            scales = tf.tensor_scatter_nd_update(scales, [[number]], [state.loss_scale])
            counts = tf.tensor_scatter_nd_update(counts, [[number]], [row])
            return number + 1, state, scales, counts

        return tf.while_loop(more, body, (tf.constant(0), state, scales, counts))[2:]

    scales, counts = run(tf.constant(good))
    return numbers(scales), numbers(counts)


class TestSkips:
    @pytest.mark.parametrize("kind", OPTIMIZERS)
    def test_a_skipped_batch_was_never_seen(self, mode, kind):
        def trained(slopes):
            weights, optimizer = tf.Variable([1.0, 2.0]), OPTIMIZERS[kind]()
            scaler = amp.LossScaler("keras")
            step = mode(linear_step(scaler, weights, optimizer))
            rows = []
            for slope in slopes:
                step(vector(slope, 1.0))
                rows.append([numbers(weights), [numbers(v) for v in optimizer.variables]])
            return rows

        with_it = trained([0.5, NAN, 0.25, INF, 2.0])
        assert with_it[1] == with_it[0]
        assert with_it[3] == with_it[2]
        assert [with_it[i] for i in (0, 2, 4)] == trained([0.5, 0.25, 2.0])

    def test_scaling_by_powers_of_two_changes_no_bit(self, mode):
        plain, scaled = tf.Variable([1.0, 2.0]), tf.Variable([1.0, 2.0])
        scaler = amp.LossScaler(polyamp.Dynamic(growth_interval=2))
        step = mode(linear_step(scaler, scaled, OPTIMIZERS["adam"]()))
        optimizer = OPTIMIZERS["adam"]()
        optimizer.build([plain])

        def unscaled(slope):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(plain * slope)
            optimizer.apply_gradients([(tape.gradient(loss, plain), plain)])

        reference = mode(unscaled)
        for slope in (0.1, 0.7, -0.3, 1e-3):
            step(vector(slope, 1 / 3))
            reference(vector(slope, 1 / 3))
            assert numbers(scaled) == numbers(plain)

    def test_a_loss_that_is_not_finite(self, mode):
        weights, scaler = tf.Variable([1.0]), amp.LossScaler("keras")

        def step(loss):
            return scaler.apply(Descent(), [(tf.ones(1), weights)], loss)

        made = mode(step)(tf.constant(NAN))
        assert int(made.reason) == polyamp.Reason.LOSS_NOT_FINITE
        assert not applied(made)
        assert applied(mode(step)(tf.constant(2.0)))
        assert numbers(weights) == [1.0 - 2.0**-14]

    def test_all_in_one_loop_inside_one_function(self):
        weights = tf.Variable([0.0])
        scaler = amp.LossScaler(polyamp.Dynamic(init_scale=8.0, growth_interval=2))
        step = linear_step(scaler, weights, OPTIMIZERS["sgd"]())

        @tf.function
        def epoch(slopes):
            kept = tf.constant(0)
            for slope in slopes:
                if step(slope).applied:
                    kept += 1
            return kept

        assert int(epoch(vector([1.0], [INF], [1.0], [1.0], [NAN]))) == 3
        assert scaler.state == (4.0, 0, 1, 5, 2, 1, polyamp.Reason.OVERFLOW, 0, ())

    def test_accumulated_over_micro_batches(self, mode):
        weights, scaler = tf.Variable([0.0]), amp.LossScaler("keras")

        def step(slopes):
            total = tf.zeros_like(weights)
            for slope in tf.unstack(slopes):
                with tf.GradientTape() as tape:
                    scaled = scaler.scale(tf.reduce_sum(weights * slope))
                total += tape.gradient(scaled, weights)
            return scaler.apply(Descent(), [(total / 2, weights)])

        run = mode(step)
        assert not applied(run(vector(1.0, INF)))
        assert applied(run(vector(1.0, 2.0)))
        assert numbers(weights) == [-1.5]


class TestGradients:
    def test_absent_ones(self, mode):
        first, second, scaler = tf.Variable([1.0]), tf.Variable([2.0]), amp.LossScaler("keras")

        def step(grad):
            return scaler.apply(Descent(), [(None, first), (grad, second)])

        mode(step)(vector(2.0**15))
        assert (numbers(first), numbers(second)) == ([1.0], [1.0])

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
        with pytest.raises(ValueError, match="longer"):
            step(vector(1.0))
        assert scaler.state == scaler.rule.init()


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
