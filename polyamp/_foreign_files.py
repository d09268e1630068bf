"""Files a loss scaler may lie in, read without ever unpickling objects.

torch checkpoints go through torch's weights_only reader, which builds tensors, numbers, strings and
containers and calls nothing. Classes of a few training libraries that lie beside the scaler are
replaced by `Fields`, which keeps attributes and does nothing; their code is not imported. Anything
else is refused.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyamp._errors import StateError
from polyamp._foreign_find import CONTAINERS
from polyamp._foreign_state import DIALECTS

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
"""Files that are written as torch checkpoints."""

_STUBBED = (
    "deepspeed.",
    "megatron.",
    "lightning.",
    "lightning_fabric.",
    "pytorch_lightning.",
    "omegaconf.",
    "numpy.",
    "pathlib.",
)
_PLAIN_CLASS = "argparse.Namespace"
_ALWAYS = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "argparse.Namespace",
)


class Fields:
    """Stands for an object of a class that is not imported: keeps its attributes, does nothing."""

    def __new__(cls, *_args: Any, **_named: Any) -> Fields:
        return object.__new__(cls)

    def __init__(self, *_args: Any, **_named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, Mapping):
                self.__dict__.update({k: v for k, v in part.items() if isinstance(k, str)})


def read_file(path: str | os.PathLike[str]) -> Any:
    """What lies in a JSON file, a torch checkpoint, a Keras file, or Accelerate's directory.

    Raises:
        StateError: not readable, not one of these, or it holds objects that would run code.
    """
    place = Path(path)
    if place.is_dir():
        inner = place / "scaler.pt"
        if not inner.is_file():
            raise StateError(f"{place} is a directory without a scaler.pt (as Accelerate writes)")
        place = inner
    try:
        with place.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        raise StateError(f"cannot read {place}: {error.strerror or error}") from error
    if start[:8] == b"\x89HDF\r\n\x1a\n":
        return _hdf5(place, str(place))
    if start[:2] == b"PK":
        return _keras(place) if _is_keras(place) else _torch(place, zipped=True)
    if start.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        return parse_json(place.read_bytes(), str(place))
    if start[:1] == b"\x80":
        return _torch(place, zipped=False)
    raise StateError(
        f"{place} is neither JSON, a torch checkpoint, nor a Keras file (.keras, .weights.h5);"
        " polyamp reads nothing else"
    )


def parse_json(text: str | bytes, name: str) -> Any:
    """The value of a JSON text.

    Raises:
        StateError: not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StateError(f"{name} is not JSON: {error}") from error


def _torch(path: Path, *, zipped: bool) -> Any:
    try:
        import torch
        from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals
    except ImportError as error:
        raise StateError(f"{path} is a torch checkpoint: reading it needs torch") from error
    names = list(_ALWAYS)
    try:
        if zipped:
            names += get_unsafe_globals_in_checkpoint(str(path))
        refused = sorted(n for n in names if not n.startswith(_STUBBED) and n != _PLAIN_CLASS)
        if not refused:
            with safe_globals([(Fields, name) for name in dict.fromkeys(names)]):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped or None)
    except Exception as error:  # the reader's own errors are of many kinds
        raise StateError(
            f"{path} cannot be read as plain data: {_first_line(error)}. {_INSTEAD}"
        ) from error
    raise StateError(
        f"{path} holds objects that only their own code can rebuild: {', '.join(refused[:5])}."
        f" {_INSTEAD}"
    )


_INSTEAD = (
    "polyamp never unpickles objects. Load the file where its code is installed and pass on"
    " scaler.state_dict()"
)


def _first_line(error: Exception) -> str:
    if isinstance(error, pickle.UnpicklingError):  # whose text is about switching the safety off
        return "it is a pickle with objects in it, and loading those could run code"
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300].rstrip(".")


def _is_keras(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return {"config.json", "metadata.json"} <= set(archive.namelist())
    except zipfile.BadZipFile as error:
        raise StateError(f"{path} is a damaged archive: {error}") from error


def _keras(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        model = parse_json(archive.read("config.json"), f"{path}: config.json")
        optimizer = _inner(model, "compile_config", "optimizer")
        if (optimizer.get("module"), optimizer.get("class_name")) != _KERAS_CLASS:
            raise StateError(
                f"{path}: the model was not compiled with {'.'.join(_KERAS_CLASS)}."
                " polyamp's own saves with to_dict()"
            )
        if _WEIGHTS not in archive.namelist():
            raise StateError(f"{path}: {_WEIGHTS} is missing")
        with tempfile.TemporaryFile() as weights:
            with archive.open(_WEIGHTS) as packed:
                shutil.copyfileobj(packed, weights)
            weights.seek(0)
            return {**_hdf5(weights, str(path)), **_inner(optimizer, "config")}


_KERAS_CLASS = ("keras.optimizers", "LossScaleOptimizer")
_WEIGHTS = "model.weights.h5"


def _inner(data: Any, *keys: str) -> Mapping[str, Any]:
    """What lies under `keys`; empty where there is no such dict."""
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data if isinstance(data, Mapping) else {}


def _hdf5(source: Any, name: str) -> dict[str, Any]:
    try:
        import h5py  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise StateError(f"{name} is an HDF5 file: reading it needs h5py") from error
    try:
        with h5py.File(source, "r") as file:
            groups = _keras_3(file) or _keras_legacy(file, name)
            scalars = {k: v[()] for k, v in groups[0].items() if v.shape == ()}
    except (OSError, LookupError, AttributeError, TypeError, RuntimeError) as error:
        why = _first_line(error)
        raise StateError(f"{name} cannot be read as a Keras file: {why}") from error
    if len(scalars) != 2:
        raise StateError(f"{name} holds no variables of {'.'.join(_KERAS_CLASS)}")
    return {**scalars, **groups[1]}


_Variables = tuple[dict[str, Any], Mapping[str, Any]]


def _keras_3(file: Any) -> _Variables | None:
    """From `.weights.h5`: iteration, learning rate, step counter, scale, then the inner ones."""
    own, inner = file.get("optimizer/vars"), file.get("optimizer/inner_optimizer/vars")
    if own is None or inner is None or len(own) != len(inner) + 4:
        return None
    return {"step_counter": own["2"], "dynamic_scale": own["3"]}, {}


def _keras_legacy(file: Any, name: str) -> _Variables:
    """From a whole model in one `.h5`: variables by name, configuration in an attribute."""
    for group in file.get("optimizer_weights", {}).values():
        if "dynamic_scale" in group and "step_counter" in group:
            told = parse_json(file.attrs.get("training_config", "{}"), name)
            found = {key: group[key] for key in ("step_counter", "dynamic_scale")}
            return found, _inner(told, "optimizer_config", "config")
    return {}, {}


def write_file(
    path: str | os.PathLike[str], data: dict[str, Any], system: str, *, force: bool = False
) -> None:
    """Write an exported scaler, whole or not at all: JSON, or a torch checkpoint by its suffix.

    Args:
        path: ends in .pt, .pth, .bin or .ckpt for a torch checkpoint, in which `system` finds
            tensors where it expects them.
        data: what `export_scaler` returned.
        system: the system it was written for.
        force: replace a file that is there.

    Raises:
        StateError: the file is there already, is no regular file, or cannot be written.
    """
    place = Path(path).resolve()  # through links, to the file they lead to
    if place.exists() and not place.is_file():
        raise StateError(f"{place} is no regular file; give the name of one, or - for stdout")
    if place.exists() and not force:
        raise StateError(f"{place} is there already; --force replaces it")
    try:
        handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
    except OSError as error:
        raise StateError(f"cannot write {place}: {error.strerror or error}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            if place.suffix in TORCH_SUFFIXES:
                _save_torch(data, system, file)
            else:
                file.write(to_json(data).encode())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, place)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError):
            raise StateError(f"cannot write {place}: {error.strerror or error}") from error
        raise


def to_json(data: Any) -> str:
    """Strict JSON with a line's end."""
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _save_torch(data: dict[str, Any], system: str, file: Any) -> None:
    try:
        import torch
    except ImportError as error:
        raise StateError("writing a torch checkpoint needs torch; end the name in .json") from error
    dialect = DIALECTS.get(CONTAINERS.get(system, system))
    keys = dialect.tensors if dialect else ()
    torch.save(
        {k: torch.tensor([v], dtype=torch.float32) if k in keys else v for k, v in data.items()},
        file,
    )
