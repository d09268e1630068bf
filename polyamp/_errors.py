"""The errors polyamp raises. Each message names what came, what is allowed and what to do."""

from __future__ import annotations

from collections.abc import Iterable


class PolyampError(Exception):
    """Base of every error polyamp raises on purpose."""


class PolicyError(PolyampError, ValueError):
    """A policy, a policy string or a policy map is not valid, or a backend cannot apply it."""


class RuleError(PolyampError, ValueError):
    """A loss-scaling rule was given a parameter outside its range, or is not known."""


class StateError(PolyampError, ValueError):
    """A saved state or configuration cannot be read. The live object is unchanged."""


class ScaleFloorError(PolyampError, RuntimeError):
    """The scaler gave up: overflow at the smallest scale, or too many skipped steps in a row.

    Attributes:
        loss_scale: the scale in force, float.
        skipped_in_a_row: consecutive skipped steps, int.
        module: name of the first module known to have overflowed, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        loss_scale: float,
        skipped_in_a_row: int,
        module: str | None = None,
    ) -> None:
        super().__init__(message)
        self.loss_scale = loss_scale
        self.skipped_in_a_row = skipped_in_a_row
        self.module = module

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (str(self), self.loss_scale, self.skipped_in_a_row, self.module))


def _rebuild(message: str, scale: float, row: int, module: str | None) -> ScaleFloorError:
    return ScaleFloorError(message, loss_scale=scale, skipped_in_a_row=row, module=module)


class DisagreementError(PolyampError, RuntimeError):
    """Ranks or devices came to different decisions about the same step."""


class BackendError(PolyampError, RuntimeError):
    """A backend is unknown, ambiguous, not installed, or cannot do what was asked of it."""


class SkippedStepWarning(UserWarning):
    """A training step was skipped because a gradient or the loss was not finite."""


def closest(
    word: str, allowed: Iterable[object], count: int = 1, *, likeness: float = 0.4
) -> list[str]:
    """The entries of `allowed` most like `word`, best first, at most `count`.

    None is less like it than `likeness`, from 0 (nothing in common) to 1 (the same).
    """
    import difflib

    return difflib.get_close_matches(word, [str(a) for a in allowed], n=count, cutoff=likeness)
