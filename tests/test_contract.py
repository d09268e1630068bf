"""The contract on every installed backend and on the toy; and the contract itself can fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import polyamp_toy
import pytest

import polyamp
from polyamp.testing import BackendContract, Training

Convert = Callable[[Any], Any]


def _torch() -> tuple[Convert, Convert]:
    import torch

    return (lambda a: torch.from_numpy(np.array(a)), lambda t: t.detach().cpu().numpy())


def _jax() -> tuple[Convert, Convert]:
    import jax.numpy as jnp

    return jnp.asarray, np.asarray


def _tensorflow() -> tuple[Convert, Convert]:
    import tensorflow as tf

    return (tf.constant, np.asarray)


def _keras() -> tuple[Convert, Convert]:
    from keras import ops

    def to_numpy(tensor: Any) -> Any:
        if hasattr(tensor, "detach"):
            tensor = tensor.detach().cpu()
        return tensor.numpy() if hasattr(tensor, "numpy") else np.asarray(tensor)

    return (lambda a: ops.convert_to_tensor(a, dtype=str(a.dtype)), to_numpy)


ARRAYS: dict[str, Callable[[], tuple[Convert, Convert]]] = {
    "jax": _jax,
    "keras": _keras,
    "tensorflow": _tensorflow,
    "torch": _torch,
}
"""For each framework: from numpy, to numpy."""


class TestToy(BackendContract):
    """As the documentation of the contract shows it."""

    backend = polyamp_toy

    def to_array(self, array: Any) -> Any:
        return np.array(array)

    def to_numpy(self, array: Any) -> Any:
        return np.asarray(array)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")
class TestInstalled(BackendContract):
    """The same tests for each of polyamp's own backends."""

    @pytest.fixture(autouse=True)
    def _use(self, backend: ModuleType) -> None:
        self.backend = backend

    def to_array(self, array: Any) -> Any:
        return ARRAYS[self.backend.NAME]()[0](array)

    def to_numpy(self, array: Any) -> Any:
        return ARRAYS[self.backend.NAME]()[1](array)


CHECKS = [name for name in dir(BackendContract) if name.startswith("test_")]


def broken(**members: Any) -> TestToy:
    """The toy's contract with some members replaced."""
    contract = TestToy()
    contract.backend = SimpleNamespace(**{**vars(polyamp_toy), **members})  # type: ignore[assignment]
    return contract


def broken_xp(**functions: Any) -> TestToy:
    return broken(xp=type("Broken", (polyamp_toy.Ops,), functions)())


def failing(contract: BackendContract, checks: Iterable[str] = CHECKS) -> set[str]:
    """The names of those `checks` that fail."""
    failed = set()
    for name in checks:
        try:
            getattr(contract, name)()
        except Exception:
            failed.add(name.removeprefix("test_"))
    return failed


def _norm_inspect(grads: Any, loss_scale: Any, *args: Any, **more: Any) -> polyamp.Signal:
    """Judges the sum of squares, as several libraries do."""
    with np.errstate(all="ignore"):
        norm = sum(np.sum(g * g) for g in grads if g is not None)
        return polyamp_toy.inspect(grads, loss_scale, *args, **more)._replace(
            finite=np.isfinite(norm)
        )


def _only_scaled(grads: Any, loss_scale: Any, *args: Any, **more: Any) -> polyamp.Signal:
    return polyamp_toy.inspect(grads, 1.0, *args, **more)


def _multiplying_select(flag: Any, new: Any, old: Any) -> list[Any]:
    with np.errstate(all="ignore"):
        return [n * flag + o * (1 - flag) for n, o in zip(new, old, strict=True)]


def _half_unscale(grads: Any, inverse: Any) -> Any:
    return [None if g is None else g * g.dtype.type(inverse) for g in grads]


Step = Callable[[Any, Any], Any]


def _each(change: Step) -> Any:
    """A toy_train of single steps, each of which `change(training, number)` may alter."""

    def train(training: Training) -> list[Any]:
        rows: list[Any] = []
        for number, batch in enumerate(training.batches):
            one = training._replace(batches=[batch])
            if rows:
                one = one._replace(weights=rows[-1][0], state=rows[-1][1])
            rows += change(one, number)
        return rows

    return train


def _new_scale(one: Training, number: int) -> Any:
    """Unscales with the scale of the next step."""
    old = one.rule.init() if one.state is None else one.state
    ((after, new),) = polyamp_toy.toy_train(one)
    factor = np.float32(old.loss_scale / new.loss_scale)
    return [([w + (a - w) * factor for a, w in zip(after, one.weights, strict=True)], new)]


def _forgetful(one: Training, number: int) -> Any:
    """Starts each step from a fresh state."""
    return polyamp_toy.toy_train(one._replace(state=None))


def _stepping_on_skips(one: Training, number: int) -> Any:
    ((after, new),) = polyamp_toy.toy_train(one)
    return [([w - 1 for w in one.weights] if new.skipped_in_a_row else after, new)]


def _touched_moments(training: Training) -> Any:
    """After a skip, weights move by other moments than they should."""
    rows: list[Any] = []
    for weights, state in polyamp_toy.toy_train(training):
        rows.append(
            (
                [
                    w if state.skipped_in_a_row else w * np.float32(1 + state.skipped)
                    for w in weights
                ],
                state,
            )
        )
    return rows


def _secretive() -> Any:
    """Keeps something of its own beside weights and state."""
    calls = [0]

    def train(training: Training) -> Any:
        calls[0] += 1
        rows = polyamp_toy.toy_train(training)
        return [([w * np.float32(0.5 ** (calls[0] % 3)) for w in ws], s) for ws, s in rows]

    return train


def _replay_at(step: int, **changes: Any) -> Any:
    """A replay that is wrong at one step."""

    def replay(*args: Any) -> Any:
        found = polyamp_toy.replay(*args)
        for state in found:
            for name, by in changes.items():
                getattr(state, name)[step:] += by
        return found

    return replay


def test_the_toy_passes_everything_that_is_broken_below() -> None:
    assert failing(TestToy()) == set()
    assert len(CHECKS) == 37


@pytest.mark.parametrize(
    ("contract", "check"),
    [
        (broken_xp(c=lambda self, value, kind: value), "constants_are_typed_scalars"),
        (broken_xp(c=lambda self, value, kind: np.int64(value)), "constants_are_typed_scalars"),
        (
            broken_xp(where=lambda self, c, a, b: a * c + b * (1 - c)),
            "where_is_not_harmed_by_the_other_branch",
        ),
        (broken_xp(maximum=lambda self, a, b: a), "minimum_and_maximum"),
        (broken_xp(isfinite=lambda self, a: a == a), "isfinite_and_logic"),
        (broken_xp(logical_not=lambda self, a: ~int(a)), "isfinite_and_logic"),
        (broken_xp(multiply=lambda self, a, b: float(a) * float(b)), "multiply_rounds_to_f32"),
        (broken_xp(bits=lambda self, a: np.int32(a)), "bits_and_shifts"),
        (
            broken_xp(right_shift=lambda self, a, n: np.int32((int(a) & 0xFFFFFFFF) >> int(n))),
            "bits_and_shifts",
        ),
        (
            broken_xp(as_f32=lambda self, a: np.asarray(a).astype(np.float64)),
            "integers_as_f32",
        ),
        (broken(inspect=_norm_inspect), "inspect_needs_no_norm"),
        (broken(inspect=_only_scaled), "inspect_judges_the_unscaled_value_in_f32"),
        (broken(unscale=_half_unscale), "unscale_is_exact_for_powers_of_two_and_wide_enough"),
        (broken(select=_multiplying_select), "select_never_multiplies"),
        (
            broken(cast=lambda tree, dtype: [a.astype("float16") for a in tree]),
            "cast_touches_only_floating_arrays",
        ),
        (
            broken(reduce=lambda signal, group: signal._replace(amax=None)),
            "reduce_without_ranks_changes_nothing",
        ),
        (
            broken(compiled=lambda fn: lambda state, signal: state),
            "compiled_transitions_equal_the_host",
        ),
        (broken(replay=_replay_at(9, clean=1)), "golden_traces"),
        (broken(replay=_replay_at(299, loss_scale=1)), "random_signals"),
        (broken(replay=lambda *args: [s * 1.0 for s in args]), "random_signals"),
        (broken(modes=lambda kind: ["jit"]), "modes_begin_with_eager"),
        (broken(toy_train=_each(_new_scale)), "training_unscales_with_the_scale_that_was_used"),
        (broken(toy_train=_each(_new_scale)), "unscaling_is_exact_in_training"),
        (broken(toy_train=_each(_forgetful)), "training_decides_as_the_host"),
        (broken(toy_train=_each(_forgetful)), "trainings_that_overflow_by_their_data"),
        (broken(toy_train=_secretive()), "training_goes_on_from_a_saved_state"),
        (broken(toy_train=_secretive()), "training_resumes_after_any_step"),
        (broken(toy_train=_secretive()), "training_is_handed_over"),
        (
            broken(toy_train=_each(_stepping_on_skips)),
            "training_skips_as_if_the_batch_had_never_been_seen",
        ),
        (
            broken(toy_train=_each(_stepping_on_skips)),
            "one_nan_in_a_large_gradient_is_seen_in_training",
        ),
        (broken(toy_train=_touched_moments), "skips_leave_no_trace_in_the_moments"),
        (broken(devices=lambda: [0]), "name_and_devices"),
    ],
)
def test_the_contract_catches(contract: BackendContract, check: str) -> None:
    assert failing(contract, [f"test_{check}"]) == {check}


def test_the_contract_names_missing_members() -> None:
    contract = TestToy()
    contract.backend = SimpleNamespace(NAME="half", xp=polyamp_toy.xp)  # type: ignore[assignment]
    with pytest.raises(AssertionError, match=r"lacks.*'inspect', 'unscale'.*'toy_train'"):
        contract.test_has_every_member()


def test_a_subclass_must_give_the_two_conversions() -> None:
    with pytest.raises(NotImplementedError, match="to_array"):
        BackendContract().to_array(np.ones(1))
    with pytest.raises(NotImplementedError, match="to_numpy"):
        BackendContract().to_numpy(np.ones(1))
