"""Backends: what one is (`Backend`), which are installed (`backends`), how to get one."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

from polyamp._errors import BackendError, closest
from polyamp._scaling import Rule
from polyamp._state import ScalerState, Signal

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from polyamp.testing import Signals, Training

GROUP = "polyamp.backends"
"""Entry-point group in which a distribution announces its backend module."""


class Backend(Protocol):
    """What a backend module offers. A module with these names is one; there is no base class.

    `Tree` below is whatever the framework calls a collection of arrays: a list of tensors, a
    pytree, a list of variables.
    """

    NAME: str
    """The backend's name, as in the entry point and in `backend(NAME)`."""

    @property
    def xp(self) -> Any:
        """`polyamp.Namespace` of the framework on its default device."""

    @property
    def inspect(self) -> Callable[..., Signal]:
        """`inspect(grads, loss_scale, loss=None, amax=False, sub=False) -> Signal`.

        `finite` is judged on the gradients as they came and on their unscaled values: a scaled
        1e35 at scale 1e-6 is an overflow. Entries that are None and empty arrays are passed over.
        """

    @property
    def unscale(self) -> Callable[[Any, Any], Any]:
        """`unscale(grads, inverse) -> grads` times `inverse` (f32), in float32 or wider."""

    @property
    def select(self) -> Callable[[Any, Any, Any], Any]:
        """`select(flag, new, old) -> tree`: new where flag, else old, whatever NaN new holds."""

    @property
    def cast(self) -> Callable[[Any, str], Any]:
        """`cast(tree, dtype) -> tree` with floating arrays in `dtype`, all else untouched."""

    @property
    def reduce(self) -> Callable[[Signal, Any], Signal]:
        """`reduce(signal, group) -> Signal` agreed over the ranks of `group` (None: no ranks)."""

    @property
    def compiled(self) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """`compiled(fn) -> fn` under the framework's compiler."""

    @property
    def devices(self) -> Callable[[], Iterable[str]]:
        """Names of the usable devices, e.g. ["cpu", "cuda"]."""

    @property
    def modes(self) -> Callable[[str], Iterable[str]]:
        """`modes(kind) -> names` of the ways in which the backend runs, "eager" first.

        `kind` is "transition" (of `replay`) or "training" (of `toy_train`); the others are its
        compilers, such as ["eager", "jit", "scan"].
        """

    @property
    def replay(self) -> Callable[[Rule, Sequence[Signals], str, str], list[ScalerState]]:
        """`replay(rule, sequences, mode, device) -> states`, for the contract.

        Each sequence of signals, all of one length T, through `bind(rule, xp)` from a fresh state:
        one state a sequence, of numpy arrays [T] with the values after each step, as they came
        (f32 and i32). Compiled modes had best loop inside the graph.
        """

    @property
    def toy_train(self) -> Callable[[Training], list[tuple[list[Any], ScalerState]]]:
        """`toy_train(training) -> [(weights, state)]` after each step, for the contract.

        Real training steps through the backend's public API on one optimizer, as the
        `polyamp.testing.Training` says; weights as numpy float32, the state in Python numbers.
        """


def backends() -> dict[str, ModuleType]:
    """The backends whose framework is installed, by name; importing them imports the framework.

    Raises:
        BackendError: two distributions announce different modules under one name.
        Exception: whatever a framework that is installed but broken raises when imported.
    """
    found: dict[str, ModuleType] = {}
    for name, point in _announced().items():
        try:
            found[name] = _load(point)
        except _NotInstalledError:
            continue
    return found


def backend(name: str) -> Backend:
    """The backend called `name`.

    Raises:
        BackendError: no such backend, its framework is not installed, it lacks a member of
            `Backend`, or two modules are announced under the name.
        Exception: whatever a framework that is installed but broken raises when imported.
    """
    announced = _announced()
    if not isinstance(name, str) or name not in announced:
        near = closest(str(name), announced)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise BackendError(
            f"no backend {name!r}: found {', '.join(announced) or 'none'}.{hint} A backend is a"
            f" module announced under the entry-point group {GROUP!r}"
        )
    try:
        module = _load(announced[name])
    except _NotInstalledError as error:
        raise BackendError(
            f"backend {name!r} needs {error.name}, which is not installed; for polyamp's own"
            f" backends: pip install 'polyamp[{name}]'"
        ) from error
    missing = [member for member in _members() if not hasattr(module, member)]
    if missing:
        raise BackendError(f"backend {name!r} ({module.__name__}) lacks {', '.join(missing)}")
    return cast(Backend, module)


class _NotInstalledError(Exception):
    def __init__(self, name: str | None) -> None:
        super().__init__(name)
        self.name = name


def _members() -> list[str]:
    return [n for n in (*Backend.__annotations__, *vars(Backend)) if not n.startswith("_")]


def _announced() -> Mapping[str, EntryPoint]:
    from importlib.metadata import entry_points

    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise BackendError(
                f"two backends are called {point.name!r}: {other.value} and {point.value}."
                " Uninstall one of the distributions that announce them"
            )
    return found


def _importer(error: ImportError) -> str:
    """Name of the module whose import statement failed: a framework's own means it is broken."""
    from traceback import walk_tb

    names = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    return [name for name in names if name.partition(".")[0] != "importlib"][-1]


def _load(point: EntryPoint) -> ModuleType:
    try:
        return importlib.import_module(point.value)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        own = point.value.partition(".")[0]
        asked = _importer(error).partition(".")[0]
        if missing not in ("", own) and importlib.util.find_spec(missing) is None and asked == own:
            raise _NotInstalledError(missing) from error
        raise
