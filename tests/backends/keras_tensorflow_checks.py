"""What only TensorFlow has: graphs, XLA, slices, checkpoints, replicas, workers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import pytest

if keras.config.backend() != "tensorflow":
    pytest.skip("TensorFlow's own checks", allow_module_level=True)

import keras_cases as kc
import numpy as np
import tensorflow as tf
from keras_selector_cases import CAN, SCALE, trained, wide_model

import polyamp
import polyamp.keras as amp

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
TRACE = ".x..n."


@pytest.mark.parametrize("xla", [False, True])
def test_a_graph_built_before_the_optimizer_scales_with_the_live_scale(xla: bool) -> None:
    opt = kc.optimizer(rule=polyamp.Dynamic(init_scale=4.0, growth_interval=1))
    var = keras.Variable([10.0])

    @tf.function(jit_compile=xla)
    def step(factor: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = opt.scale_loss(tf.reduce_sum(var.value))
        opt.apply([tape.gradient(loss, var.value) * factor], [var])
        return opt.last_applied

    if xla:
        opt.build([var])
    seen = [(bool(step(tf.constant(f))), kc.value(var)[0]) for f in (1.0, 1.0, kc.INF, 1.0)]
    assert seen == [(True, 9.0), (True, 8.0), (False, 8.0), (True, 7.0)]
    assert opt.state[0] == 16.0


def test_xla_fit_leaves_no_trace_of_a_skip() -> None:
    nets = []
    for xy in (kc.data(TRACE), kc.clean_part(TRACE)):
        net = kc.model(keras.layers.BatchNormalization())
        rule = polyamp.Dynamic(init_scale=2.0**8)
        amp.compile(net, keras.optimizers.Adam(0.01), "mse", rule=rule, jit_compile=True)
        kc.fit(net, xy)
        nets.append(net)
    assert kc.equal(kc.values(nets[0].variables), kc.values(nets[1].variables))
    assert nets[0].optimizer.state == kc.follow(polyamp.Dynamic(init_scale=2.0**8), TRACE)


@pytest.mark.parametrize("graph", [False, True])
def test_slices_are_unscaled_and_judged(graph: bool) -> None:
    opt, table = kc.optimizer(), keras.Variable(np.ones((3, 2), "float32"))
    opt.build([table])

    def step(factor: Any) -> None:
        with tf.GradientTape() as tape:
            rows = tf.gather(table.value, [0, 2])
            loss = opt.scale_loss(tf.reduce_sum(rows))
        grad = tape.gradient(loss, table.value)
        assert isinstance(grad, tf.IndexedSlices)
        bad = tf.IndexedSlices(grad.values * factor, grad.indices, grad.dense_shape)
        opt.apply([bad], [table])

    run = tf.function(step) if graph else step
    run(tf.constant(kc.NAN))
    assert kc.value(table).tolist() == [[1, 1], [1, 1], [1, 1]]
    run(tf.constant(1.0))
    assert kc.value(table).tolist() == [[0, 0], [1, 1], [0, 0]]


@pytest.mark.parametrize("graph", [False, True])
def test_what_a_float16_variable_cannot_hold_is_skipped(graph: bool) -> None:
    opt, var = kc.optimizer(rule=polyamp.Static(1.0)), keras.Variable([1.0], dtype="float16")
    opt.build([var])

    def step(grad: Any) -> None:
        opt.apply([grad * opt.scale.value], [var])

    run = tf.function(step) if graph else step
    run(tf.constant([2.0**17]))
    assert (kc.value(var).tolist(), opt.state.skipped) == ([1.0], 1)
    run(tf.constant([2.0**15]))
    assert (kc.value(var).tolist(), opt.state.skipped) == ([-(2.0**15)], 1)


def test_a_checkpoint_holds_the_scaler(tmp_path: Path) -> None:
    rule = kc.RULES["tolerant"]()
    opt, var = kc.optimizer(keras.optimizers.Adam(0.1), rule=rule), keras.Variable([1.0])
    kc.eager(opt, var, ".x..x")
    tf.train.Checkpoint(optimizer=opt).save(str(tmp_path / "point"))
    other = kc.optimizer(keras.optimizers.Adam(0.1), rule=rule)
    other.build([keras.Variable([1.0])])
    path = tf.train.latest_checkpoint(str(tmp_path))
    tf.train.Checkpoint(optimizer=other).restore(path).assert_existing_objects_matched()
    assert other.state == opt.state == kc.follow(rule, ".x..x")
    assert kc.equal(kc.values(opt.variables), kc.values(other.variables))


# Replicas.


@pytest.fixture(scope="module")
def strategy() -> Any:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("where", [0, 1])
def test_an_infinity_on_one_replica_skips_all(strategy: Any, graph: bool, where: int) -> None:
    with strategy.scope():
        var = keras.Variable([1.0, 2.0])
        inner = keras.optimizers.SGD(1.0, momentum=0.5)
        opt = kc.optimizer(inner, rule=polyamp.Dynamic(init_scale=4.0, growth_interval=2))
        opt.build([var])

    def update(bad: Any) -> None:
        me = tf.distribute.get_replica_context().replica_id_in_sync_group
        grad = tf.where((me == where) & bad, kc.INF, 0.25) * tf.ones(2) * opt.scale.value
        opt.apply([grad], [var])

    def run(bad: Any) -> None:
        strategy.run(update, args=(bad,))

    step = tf.function(run) if graph else run
    seen = []
    for bad in (False, True, False):
        step(tf.constant(bad))
        copies = [c.numpy().tolist() for c in strategy.experimental_local_results(var.value)]
        assert copies[0] == copies[1]
        seen.append((copies[0], opt.state.loss_scale, int(opt.iterations.numpy())))
    # The sum of both replicas' 0.25, then half the step before plus another 0.5.
    assert seen == [([0.5, 1.5], 4.0, 1), ([0.5, 1.5], 2.0, 1), ([-0.25, 0.75], 2.0, 2)]


def test_what_overflows_only_summed_over_replicas_is_skipped(strategy: Any) -> None:
    with strategy.scope():
        opt, var = kc.optimizer(rule=polyamp.Static(1.0)), keras.Variable([1.0])
        opt.build([var])

    def run(grad: Any) -> None:
        strategy.run(lambda: opt.apply([grad * opt.scale.value], [var]))

    run(tf.constant([2.0**127]))
    assert (kc.value(var).tolist(), opt.state.skipped) == ([1.0], 1)
    run(tf.constant([2.0**126]))
    assert (kc.value(var).tolist(), opt.state.skipped) == ([-(2.0**127)], 1)


def test_fit_on_replicas_leaves_no_trace_of_a_skip(strategy: Any) -> None:
    seen = []
    for xy in (kc.data(TRACE), kc.clean_part(TRACE)):
        with strategy.scope():
            net = kc.model(keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=1))
            rule = polyamp.Dynamic(init_scale=2.0**8)
            amp.compile(net, keras.optimizers.Adam(0.01), "mse", rule=rule, metrics=["mae"])
        history = kc.fit(net, xy, epochs=2)
        seen.append(
            (history, kc.values([*net.variables, *net.optimizer.inner_optimizer.variables]))
        )
    assert seen[0][0] == seen[1][0]
    assert kc.equal(seen[0][1], seen[1][1])


def test_apply_belongs_into_a_replica(strategy: Any) -> None:
    with strategy.scope():
        opt, var = kc.optimizer(), keras.Variable([1.0])
        assert opt.initial_scale == 2.0**15
        with pytest.raises(ValueError, match=r"strategy\.run"):
            opt.apply([tf.ones(1)], [var])


def test_what_is_measured_is_agreed_over_replicas(strategy: Any) -> None:
    from polyamp_keras import reduce

    def measure() -> Any:
        context = tf.distribute.get_replica_context()
        me = context.replica_id_in_sync_group
        mine = polyamp.Signal(me == 0, True, tf.cast(me, tf.float32), tf.constant(0.25))
        return tuple(reduce(mine, context))

    finite, loss_finite, amax, sub = strategy.run(measure)
    for got, want in ((finite, False), (loss_finite, True), (amax, 1.0), (sub, 0.25)):
        assert [v.numpy() for v in strategy.experimental_local_results(got)] == [want, want]


WORKER = """
import keras, tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
import polyamp, polyamp.keras as amp
with strategy.scope():
    var = keras.Variable([1.0, 2.0])
    rule = polyamp.Dynamic(init_scale=4.0, growth_interval=2)
    opt = amp.LossScaleOptimizer(keras.optimizers.SGD(1.0), rule=rule)
    opt.build([var])

def update(bad):
    me = tf.distribute.get_replica_context().replica_id_in_sync_group
    opt.apply([tf.where((me == 1) & bad, float("inf"), 0.25) * tf.ones(2) * opt.scale.value], [var])

@tf.function
def run(bad):
    strategy.run(update, args=(bad,))

for bad in (False, True, False):
    run(tf.constant(bad))
    told = var.numpy().tolist(), opt.state.loss_scale, int(opt.iterations.numpy())
    print("SEEN", *told, flush=True)
"""


def _ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("localhost", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def test_two_workers_skip_together_and_do_not_hang() -> None:
    hosts = [f"localhost:{port}" for port in _ports(2)]
    workers = []
    for index in range(2):
        task = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}}
        env = {**os.environ, "TF_CONFIG": json.dumps(task)}
        command = [sys.executable, "-P", "-W", "ignore", "-c", WORKER]
        workers.append(
            subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        done = [worker.communicate(timeout=300) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    want = ["SEEN [0.5, 1.5] 4.0 1", "SEEN [0.5, 1.5] 2.0 1", "SEEN [0.0, 1.0] 2.0 2"]
    for out, err in done:
        assert [line for line in out.splitlines() if line.startswith("SEEN")] == want, err[-3000:]


def test_statistics_of_all_replicas(strategy: Any) -> None:
    with strategy.scope():
        model = wide_model()
        adaptive = amp.Adaptive(model, capabilities=CAN, every=2)
        amp.compile(model, "sgd", "mse", rule=polyamp.Static(SCALE), jit_compile=False)
    trained(model, 5, 16400.0, adaptive=adaptive)
    assert adaptive.statistics["first"].output.size == 32  # four rows over two replicas
    assert adaptive.selection.choices["first"].format == "bfloat16"
