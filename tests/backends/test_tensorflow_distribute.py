"""LossScaler under tf.distribute: an infinity that one replica saw is a skip on all of them.

The strategies need devices and ports of their own, so the scenarios run in processes of their own:
this file is also their program, and prints what it found as JSON.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

INF = float("inf")
TIMEOUT = 600
"""Seconds: far more than a run takes, since what is tested is that it ends at all."""


def scenario(strategy: Any, *, graph: bool) -> dict[str, Any]:
    """Six steps, the third and the fifth bad on one replica; and the good four unscaled."""
    found = train(strategy, graph, scaled=True, values=(0.5, 0.5, INF, 0.5, INF, 0.5))
    return {**found, "plain": train(strategy, graph, scaled=False, values=(0.5,) * 4)["rows"][-1]}


def train(strategy: Any, graph: bool, *, scaled: bool, values: tuple[float, ...]) -> dict[str, Any]:
    """Train on gradients that are one of `values` on the last replica and 0.5 on the others."""
    import tensorflow as tf

    import polyamp
    import polyamp.tensorflow as amp

    with strategy.scope():
        weights = tf.Variable([1.0, 2.0])
        table = tf.Variable(tf.ones((5, 2)))
        optimizer = tf.keras.optimizers.Adam(0.125)
        scaler = amp.LossScaler(polyamp.Dynamic(growth_interval=10))
    variables = [weights, table]

    def replica(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights * x) + tf.reduce_sum(tf.gather(table, [1, 1, 3]))
            target = scaler.scale(loss) if scaled else loss
        grads = tape.gradient(target, variables)
        assert isinstance(grads[1], tf.IndexedSlices)
        if scaled:
            return scaler.apply(optimizer, zip(grads, variables, strict=True)).applied
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        return tf.constant(True)

    def step(x: Any) -> Any:
        return strategy.run(replica, args=(x,))

    run = tf.function(step) if graph else step

    def batch(value: float) -> Any:
        last = strategy.num_replicas_in_sync - 1
        return strategy.experimental_distribute_values_from_function(
            lambda c: tf.fill((2,), value if c.replica_id_in_sync_group == last else 0.5)
        )

    def local(value: Any) -> list[Any]:
        found = strategy.experimental_local_results(value)
        return [v.numpy().tolist() if hasattr(v, "numpy") else v for v in found]

    rows = []
    if not scaled:
        with strategy.scope():
            optimizer.build(variables)  # Keras alone cannot do so in a graph under a strategy
    for value in values:
        applied = run(batch(value))
        rows.append(
            {
                "applied": local(applied),
                "weights": local(weights),
                "table": local(table),
                "scales": local(scaler.loss_scale),
                "slots": [local(v.value) for v in optimizer.variables],
            }
        )
    return {"rows": rows, "state": scaler.state, "iterations": int(optimizer.iterations.numpy())}


def mirrored() -> dict[str, Any]:
    """The scenario on two logical CPUs in a graph and eager, and what else a strategy asks for."""
    import tensorflow as tf

    import polyamp.tensorflow as amp
    from polyamp import BackendError, Signal
    from polyamp_tensorflow import reduce

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    found = {"graph": scenario(strategy, graph=True), "eager": scenario(strategy, graph=False)}

    def measured() -> Signal:
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        first = tf.equal(number, 0)
        amax = tf.where(first, tf.constant(3.0), tf.constant(7.0))
        sub = tf.where(first, tf.constant(0.5), tf.constant(-1.0))
        signal = Signal(tf.constant(True), first, amax, sub)
        return reduce(signal, tf.distribute.get_replica_context())

    agreed = strategy.run(tf.function(measured))
    found["signal"] = [[v.numpy().item() for v in strategy.experimental_local_results(part)]
                       for part in agreed]  # fmt: skip

    def refused(scaler: Any, run: Any) -> str:
        weights = tf.Variable(1.0)
        optimizer = tf.keras.optimizers.SGD(1.0)
        try:
            run(lambda: scaler.apply(optimizer, [(tf.constant(1.0), weights)]))
        except BackendError as error:
            return str(error)
        return "not refused"

    outside = amp.LossScaler()
    with strategy.scope():
        inside = amp.LossScaler("megatron")
        found["across"] = refused(inside, lambda step: step())
        found["outside"] = refused(outside, strategy.run)
    found["saved"] = saved(strategy, inside)
    found["sums"] = sums(strategy)
    return found


def saved(strategy: Any, scaler: Any) -> list[Any]:
    """A state written under a strategy, read by a scaler without one."""
    import tempfile

    import tensorflow as tf

    import polyamp.tensorflow as amp

    data = scaler.to_dict()
    data["state"].update(clean=7, loss_scale=3.0)
    with strategy.scope():
        there = amp.LossScaler.from_dict(data)
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(scaler=there).save(folder + "/saved")
        alone = amp.LossScaler("megatron")
        tf.train.Checkpoint(scaler=alone).restore(path).assert_consumed()
    return [alone.state, there.state]


def sums(strategy: Any) -> list[Any]:
    """Both replicas' gradients are finite, their sum is not."""
    import tensorflow as tf

    import polyamp
    import polyamp.tensorflow as amp

    with strategy.scope():
        weights = tf.Variable(1.0)
        optimizer = tf.keras.optimizers.SGD(1.0)
        scaler = amp.LossScaler(polyamp.Static(1.0))

    @tf.function
    def step() -> Any:
        return strategy.run(lambda: scaler.apply(optimizer, [(tf.constant(3e38), weights)]))

    made = step()
    return [weights.numpy().item(), *(bool(v) for v in made.applied.values)]


def worker(index: int, ports: list[int]) -> dict[str, Any]:
    """One of two processes that train together."""
    cluster = {"worker": [f"localhost:{port}" for port in ports]}
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": cluster, "task": {"type": "worker", "index": index}}
    )
    import tensorflow as tf

    return scenario(tf.distribute.MultiWorkerMirroredStrategy(), graph=True)


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, *map(str, arguments)]
    path = os.pathsep.join(p for p in sys.path if p)
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )


def results(*processes: subprocess.Popen[str]) -> list[dict[str, Any]]:
    try:
        told = [process.communicate(timeout=TIMEOUT) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, told, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return [json.loads(out) for out, _ in told]


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("localhost", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def two_replicas() -> dict[str, Any]:
    pytest.importorskip("tensorflow", reason="this is about TensorFlow")
    return results(start("mirrored"))[0]


@pytest.fixture(scope="module")
def two_workers() -> list[dict[str, Any]]:
    pytest.importorskip("tensorflow", reason="this is about TensorFlow")
    ports = free_ports(2)
    return results(*(start("worker", index, *ports) for index in range(2)))


def check(found: dict[str, Any], copies: int) -> None:
    rows = found["rows"]
    assert [row["applied"] for row in rows] in (
        [[good] * copies for good in (True, True, False, True, False, True)],
        [[good] for good in (True, True, False, True, False, True)],  # equal Python numbers
    )
    scales = [65536.0, 65536.0, 32768.0, 32768.0, 16384.0, 16384.0]
    assert [row["scales"] for row in rows] == [[scale] * copies for scale in scales]
    for row in rows:
        for part in (row["weights"], row["table"], *row["slots"]):
            assert all(copy == part[0] for copy in part)
    for bad in (2, 4):
        for part in ("weights", "table", "slots"):
            assert rows[bad][part] == rows[bad - 1][part]
        assert rows[bad + 1]["weights"] != rows[bad]["weights"]
    assert len(rows[0]["slots"]) == 2 + 2 * 2  # made once, though each replica came by
    assert rows[-1]["weights"][0] == pytest.approx([0.5, 1.5], abs=1e-4)  # Adam: four steps of 1/8
    for part in ("weights", "table", "slots"):
        assert rows[-1][part] == found["plain"][part]
    assert found["iterations"] == 4
    assert found["state"][:7] == [16384.0, 1, 1, 6, 2, 0, 0]


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_an_infinity_on_one_of_two_replicas(two_replicas: dict[str, Any], mode: str) -> None:
    check(two_replicas[mode], copies=2)


def test_an_infinity_on_one_of_two_workers(two_workers: list[dict[str, Any]]) -> None:
    for found in two_workers:
        check(found, copies=1)
    assert two_workers[0] == two_workers[1]


def test_a_signal_is_reduced_to_flags_and_largest(two_replicas: dict[str, Any]) -> None:
    assert two_replicas["signal"] == [[True] * 2, [False] * 2, [7.0] * 2, [0.5] * 2]


def test_gradients_whose_sum_over_replicas_is_not_finite(two_replicas: dict[str, Any]) -> None:
    assert two_replicas["sums"] == [1.0, False, False]


def test_where_a_strategy_wants_the_scaler_and_the_call(two_replicas: dict[str, Any]) -> None:
    assert "inside strategy.run" in two_replicas["across"]
    assert "with strategy.scope()" in two_replicas["outside"]


def test_a_checkpoint_leaves_the_strategy(two_replicas: dict[str, Any]) -> None:
    alone, there = two_replicas["saved"]
    assert alone == there
    assert alone[:2] == [3.0, 7]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    mode, *numbers = sys.argv[1:]
    here = str(Path(__file__).parent)
    sys.path[:] = [entry for entry in sys.path if entry != here]
    ports = [int(number) for number in numbers]
    print(json.dumps(mirrored() if mode == "mirrored" else worker(ports[0], ports[1:])))
