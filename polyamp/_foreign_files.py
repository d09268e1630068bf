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
import stat
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyamp._errors import StateError
from polyamp._foreign_find import CONTAINERS
from polyamp._foreign_state import DIALECTS
from polyamp._interchange import VERSION
from polyamp._state import ScalerState

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
    if _TORCH_MAGIC in start:
        return _torch(place, zipped=False)
    if start[:1] == b"\x80":
        raise StateError(f"{place} is a Python pickle, no torch checkpoint. {_INSTEAD}")
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
    "polyamp never unpickles objects, since that can run code. Where the file was made, load it and"
    " save the scaler alone: torch.save(scaler.state_dict(), 'scaler.pt'), or as JSON what"
    " state_dict() or to_dict() returns"
)
_TORCH_MAGIC = 0x1950A86A20F9469CFC6C.to_bytes(10, "little")
"""In the first bytes of torch's files before they were zip archives."""


def _first_line(error: Exception) -> str:
    if isinstance(error, pickle.UnpicklingError):  # whose text is about switching the safety off
        return "it holds more than tensors, numbers, strings and containers, or is damaged"
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
        known = (optimizer.get("module"), optimizer.get("class_name")) == _KERAS_CLASS
        if not known and optimizer.get("registered_name") != _OWN_CLASS:
            raise StateError(
                f"{path}: the model was not compiled with {'.'.join(_KERAS_CLASS)} or polyamp's,"
                " so there is no loss scaler in it"
            )
        if _WEIGHTS not in archive.namelist():
            raise StateError(f"{path}: {_WEIGHTS} is missing")
        with tempfile.TemporaryFile() as weights:
            with archive.open(_WEIGHTS) as packed:
                shutil.copyfileobj(packed, weights)
            weights.seek(0)
            return _hdf5(weights, str(path), _inner(optimizer, "config"))


_KERAS_CLASS = ("keras.optimizers", "LossScaleOptimizer")
_OWN_CLASS = "polyamp>LossScaleOptimizer"
_WEIGHTS = "model.weights.h5"


def _inner(data: Any, *keys: str) -> Mapping[str, Any]:
    """What lies under `keys`; empty where there is no such dict."""
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data if isinstance(data, Mapping) else {}


def _hdf5(source: Any, name: str, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The scaler in a file of Keras'; `config` is its optimizer's where it lies elsewhere."""
    try:
        import h5py  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise StateError(f"{name} is an HDF5 file: reading it needs h5py") from error
    try:
        with h5py.File(source, "r") as file:
            found, told = _keras_3(file), config or {}
            if not found:
                found, told = _keras_legacy(file, name)
            scalars = {k: v[()] for k, v in found.items() if v.shape == ()}
    except (OSError, LookupError, AttributeError, TypeError, RuntimeError) as error:
        why = _first_line(error)
        raise StateError(f"{name} cannot be read as a Keras file: {why}") from error
    if not {"step_counter", "dynamic_scale"} <= set(scalars):
        raise StateError(f"{name} holds no variables of {'.'.join(_KERAS_CLASS)}")
    if len(scalars) == 2 or "dynamic_growth_steps" in told:
        return {**{key: scalars[key] for key in ("step_counter", "dynamic_scale")}, **told}
    if "rule" not in told:
        raise StateError(
            f"{name} holds the variables of polyamp's LossScaleOptimizer without its rule: read the"
            " .keras file, or pass on optimizer.to_dict() as JSON"
        )
    return _own_scaler(scalars, told["rule"])


def _own_scaler(scalars: Mapping[str, Any], rule: Any) -> dict[str, Any]:
    """The portable form of the variables of polyamp's LossScaleOptimizer."""
    values = {key: value.item() for key, value in scalars.items()}
    scale, clean = values.pop("dynamic_scale"), values.pop("step_counter")
    memory = [values.pop(f"memory_{i}", None) for i in range(len(values) - len(_COUNTS))]
    state = {"loss_scale": scale, "clean": clean, **values, "memory": memory}
    head = {"polyamp": VERSION, "kind": "state"}
    return {**head, "kind": "scaler", "rule": rule, "state": {**head, **state}}


_COUNTS = ScalerState._fields[2:-1]


def _keras_3(file: Any) -> dict[str, Any]:
    """From `.weights.h5`: iteration, learning rate, the scaler's, then the inner optimizer's.

    Keras has step counter and scale; polyamp the fields of `ScalerState`, then its memory.
    """
    own, inner = file.get("optimizer/vars"), file.get("optimizer/inner_optimizer/vars")
    if own is None or inner is None:
        return {}
    count = len(own) - len(inner) - 2
    names: tuple[str, ...] = ("step_counter", "dynamic_scale")
    if count != 2:
        memory = (f"memory_{i}" for i in range(count - len(_COUNTS) - 2))
        names = ("dynamic_scale", "step_counter", *_COUNTS, *memory)
    if count != len(names):
        return {}
    return {name: own[str(place)] for place, name in enumerate(names, start=2)}


def _keras_legacy(file: Any, name: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """From a whole model in one `.h5`: variables by name, configuration in an attribute."""
    for group in file.get("optimizer_weights", {}).values():
        if "dynamic_scale" in group and "step_counter" in group:
            told = parse_json(file.attrs.get("training_config", "{}"), name)
            config = _inner(told, "optimizer_config", "config")
            names = ["dynamic_scale", "step_counter"]
            if "rule" in config:
                names += [key for key in group if key in _COUNTS or key.startswith("memory_")]
            return {key: group[key] for key in names}, config
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
    try:
        place = Path(path).resolve()  # through links, to the file they lead to
        mode = place.lstat().st_mode if os.path.lexists(place) else None
    except (OSError, RuntimeError) as error:
        raise StateError(f"cannot write {path}: {error}") from error
    if mode is not None and not stat.S_ISREG(mode):
        raise StateError(f"{place} is no regular file; give the name of one, or - for stdout")
    if mode is not None and not force:
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
        os.chmod(temporary, 0o666 & ~_umask() if mode is None else stat.S_IMODE(mode))
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
