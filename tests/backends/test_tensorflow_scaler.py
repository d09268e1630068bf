"""LossScaler in GradientTape loops: eager, in tf.function and under XLA."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="this is about TensorFlow")

from tensorflow_cases import (
    INF,
    NAN,
    OPTIMIZERS,
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
import polyamp_tensorflow

pytestmark = pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")


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
        rule = polyamp.Predictive(sub_interval=2)
        weights, scaler = tf.Variable(tf.zeros(3)), amp.LossScaler(rule)
        step, want = mode(given_step(scaler, [weights])), rule.init()
        for number, top in enumerate((3.0, -700.0, INF, 0.25, 1e-3)):
            step(vector(0.0, top, -1e-5))
            share = 0.5 if number % 2 == 0 else -1.0
            signal = polyamp.Signal(top < INF, True, float(np.float32(abs(top))), share)
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
