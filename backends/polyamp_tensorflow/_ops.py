"""The array functions of a transition (`polyamp.Namespace`) on TensorFlow tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from polyamp._xp import Kind

_DTYPES = {"f32": tf.float32, "i32": tf.int32}


class Ops:
    """`polyamp.Namespace` over 0-d tensors, eager or in a graph.

    Constants belong to the graph that is current when they are made: bind a rule in the function
    that is being traced, or eagerly.
    """

    where = staticmethod(tf.where)
    minimum = staticmethod(tf.minimum)
    maximum = staticmethod(tf.maximum)
    isfinite = staticmethod(tf.math.is_finite)
    logical_not = staticmethod(tf.logical_not)
    logical_or = staticmethod(tf.logical_or)
    multiply = staticmethod(tf.multiply)
    left_shift = staticmethod(tf.bitwise.left_shift)
    right_shift = staticmethod(tf.bitwise.right_shift)

    def c(self, value: float, kind: Kind) -> tf.Tensor:
        """A typed 0-d constant."""
        return tf.constant(float(value) if kind == "f32" else int(value), _DTYPES[kind])

    def bits(self, a: tf.Tensor) -> tf.Tensor:
        """The bits of an f32 as i32."""
        return tf.bitcast(a, tf.int32)

    def from_bits(self, a: tf.Tensor) -> tf.Tensor:
        """The f32 whose bits an i32 holds."""
        return tf.bitcast(a, tf.float32)

    def as_f32(self, a: tf.Tensor) -> tf.Tensor:
        """An i32 as f32."""
        return tf.cast(a, tf.float32)


xp = Ops()
"""The namespace on the device that TensorFlow chooses."""


def compiled(fn: Any) -> Any:
    """`fn` under XLA."""
    return tf.function(fn, jit_compile=True, autograph=False)


def devices() -> list[str]:
    """Names of the usable devices, such as "CPU:0", CPUs first."""
    found = [d.name.removeprefix("/device:") for d in tf.config.list_logical_devices()]
    return sorted(found, key=_cpus_first)


def _cpus_first(name: str) -> bool:
    return not name.startswith("CPU")


def select(flag: Any, new: Any, old: Any) -> Any:
    """`new` where `flag` (bool or 0-d bool tensor) is true, else `old`; any `tf.nest` structure.

    A select, not a product: NaN in the branch not taken does no harm.
    """

    def one(n: Any, o: Any) -> Any:
        return tf.where(flag, n, o) if tf.is_tensor(n) else n if bool(flag) else o

    return tf.nest.map_structure(one, new, old)
