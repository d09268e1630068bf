"""The array functions of a transition (`polyamp.Namespace`) over keras.ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import keras
import numpy as np
from keras import ops
from keras.src.backend.common.stateless_scope import in_stateless_scope

from polyamp._errors import BackendError
from polyamp._xp import Kind

FRAMEWORK: str = keras.config.backend()
"""The Keras backend of this process: "tensorflow", "jax" or "torch"."""

if FRAMEWORK not in ("tensorflow", "jax", "torch"):
    raise BackendError(
        f"Keras runs on {FRAMEWORK!r} here, which does not train; set the environment variable"
        " KERAS_BACKEND to tensorflow, jax or torch before the first import of keras"
    )

F = TypeVar("F", bound=Callable[..., Any])

_DTYPES = {"f32": "float32", "i32": "int32"}


class Ops:
    """`polyamp.Namespace` over 0-d tensors of the Keras backend, traced or not."""

    where = staticmethod(ops.where)
    minimum = staticmethod(ops.minimum)
    maximum = staticmethod(ops.maximum)
    isfinite = staticmethod(ops.isfinite)
    logical_not = staticmethod(ops.logical_not)
    logical_or = staticmethod(ops.logical_or)
    multiply = staticmethod(ops.multiply)
    left_shift = staticmethod(ops.left_shift)
    right_shift = staticmethod(ops.right_shift)

    def c(self, value: float, kind: Kind) -> Any:
        """A typed 0-d constant."""
        number = int(value) if kind == "i32" else value
        return ops.convert_to_tensor(number, dtype=_DTYPES[kind])

    def bits(self, a: Any) -> Any:
        """The bits of an f32 as i32."""
        return ops.view(a, dtype="int32")

    def from_bits(self, a: Any) -> Any:
        """The f32 whose bits an i32 holds."""
        return ops.view(a, dtype="float32")

    def as_f32(self, a: Any) -> Any:
        """An i32 as f32."""
        return ops.cast(a, "float32")


xp = Ops()
"""The namespace on the Keras backend's default device."""


def unconverted(fn: F) -> F:
    """Decorator: TensorFlow's autograph leaves `fn` and what it calls as they are."""
    if FRAMEWORK != "tensorflow":
        return fn
    import tensorflow as tf

    return tf.autograph.experimental.do_not_convert(fn)  # type: ignore[no-any-return]


def compiled(fn: Any) -> Any:
    """`fn` under the compiler of the Keras backend: tf.function, jax.jit or torch.compile."""
    if FRAMEWORK == "tensorflow":
        import tensorflow as tf

        return tf.function(fn, autograph=False)
    if FRAMEWORK == "jax":
        import jax

        return jax.jit(fn)
    from polyamp_torch._ops import compiled as torch_compiled

    return torch_compiled(fn)


def devices() -> list[str]:
    """Names of the usable devices of the Keras backend, "cpu" first."""
    if FRAMEWORK == "torch":
        from polyamp_torch._ops import devices as torch_devices

        return torch_devices()
    names = [str(name).lower() for name in keras.distribution.list_devices()]
    return ["cpu", *(name for name in names if not name.startswith("cpu"))]


def select(flag: Any, new: Any, old: Any) -> Any:
    """`new` where `flag` (bool or 0-d bool tensor) is true, else `old`; any nested structure.

    A select, not a product: NaN in the branch not taken does no harm.
    """
    return keras.tree.map_structure(lambda n, o: ops.where(flag, n, o), new, old)


def traced() -> bool:
    """Whether a jitted function or graph is being traced, so that values cannot be read."""
    if FRAMEWORK == "tensorflow":
        import tensorflow as tf

        return not tf.executing_eagerly()
    if FRAMEWORK == "jax":
        import jax

        return isinstance(jax.numpy.ones(()), jax.core.Tracer)
    return False


def read(variable: Any) -> Any:
    """The value of a Keras variable now, whatever is assigned later; on torch the tensor itself."""
    if FRAMEWORK == "tensorflow":
        import tensorflow as tf

        return tf.convert_to_tensor(variable.value)
    return variable.value


def number(tensor: Any) -> Any:
    """A 0-d tensor as a Python number; waits for the device."""
    return (tensor.numpy() if FRAMEWORK == "tensorflow" else tensor).item()


def own_tensor(variable: Any) -> Any:
    """The tensor that a torch variable holds; None where `value` may be another or is to be made.

    `value` itself costs several times as much as reading a number from it.
    """
    return None if FRAMEWORK != "torch" or in_stateless_scope() else variable._value


def number_in(variable: Any) -> Any:
    """A 0-d variable as a Python number; waits for the device."""
    tensor = own_tensor(variable)
    return number(variable.value) if tensor is None else tensor.item()


def to_numpy(tensor: Any) -> Any:
    """A tensor as a numpy array."""
    value = tensor.detach().cpu() if FRAMEWORK == "torch" else tensor
    return np.asarray(value) if FRAMEWORK == "jax" else value.numpy()


def twin(tensor: Any) -> Any:
    """A torch tensor of its own with the same numbers."""
    value = ops.convert_to_tensor(tensor)
    return value.detach().clone().requires_grad_(value.requires_grad)


def cond(flag: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """`yes()` where the 0-d bool tensor `flag` is true, else `no()`; a Python branch if it can be.

    Traced, it is `ops.cond`, which makes `no` branch 0; JAX's eager conditional compiles each time.
    """
    if traced():
        return ops.cond(flag, yes, no)
    return yes() if bool(flag) else no()


def baked(value: Any) -> bool:
    """Whether `value` would enter the jitted JAX function being traced as a constant."""
    if FRAMEWORK != "jax" or not traced():
        return False
    import jax

    return not isinstance(value, jax.core.Tracer)
