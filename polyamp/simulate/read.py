"""Traces from files: .npz, .csv, .jsonl, and one flag a line.

    .npz     AP, AA, HP, HA (full form), or the compact form that polyamp ships
    .csv     a header with amax, or with found_inf, overflow, skipped or finite; or no header and
             one flag a line (.txt too)
    .jsonl   an object a line with one of these keys

`amax` is the largest unscaled |gradient|; null, NaN or infinite means that the step overflows at
any scale. An optional `inner` is the same of the activations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from polyamp._errors import PolyampError, closest
from polyamp.simulate import compact
from polyamp.simulate.trace import OverflowTrace, RangeTrace, Trace, range_trace

FLAGS = {"found_inf": True, "overflow": True, "skipped": True, "finite": False}
"""Names of flags, and the value that means an overflow."""
SHIPPED = ("cnn_clean", "cnn_outlier", "ae_tiny", "tf_spike", "deep_vanish")
"""Names of the traces that come with polyamp."""
_TRUTHS = {"0": False, "1": True, "false": False, "true": True, "0.0": False, "1.0": True}


def read_trace(source: str | Path) -> Trace:
    """The trace in a file, or a shipped one by its name.

    Raises:
        PolyampError: there is no such file or name, or the file cannot be read as a trace; the
            message names the line.
    """
    path = Path(source)
    if not path.exists() and str(source) in SHIPPED:
        return shipped(str(source))
    readers: dict[str, Callable[[Path], Trace]] = {
        ".npz": read_npz,
        ".csv": _read_csv,
        ".txt": _read_csv,
        ".jsonl": _read_jsonl,
        ".ndjson": _read_jsonl,
    }
    reader = readers.get(path.suffix.lower())
    if not path.exists() or path.is_dir():
        near = closest(str(source), SHIPPED)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise PolyampError(f"no trace {source}: neither a file nor one of {_list(SHIPPED)}{hint}")
    if reader is None:
        raise PolyampError(f"{path.name}: a trace is one of {_list(readers)}")
    try:
        return reader(path)
    except (OSError, UnicodeDecodeError) as error:
        raise PolyampError(f"{path.name} cannot be read: {error}") from error


def shipped(name: str) -> RangeTrace:
    """One of the traces that come with polyamp."""
    with resources.as_file(resources.files(__package__) / "traces" / f"{name}.npz") as path:
        return read_npz(path)


def read_npz(path: Path) -> RangeTrace:
    """The range trace in an .npz file of the full or the compact form.

    Raises:
        PolyampError: another file, a missing array, arrays that do not fit each other.
    """
    import zipfile

    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (ValueError, OSError, EOFError, KeyError, AttributeError, zipfile.BadZipFile) as error:
        raise PolyampError(f"{path.name} is not an .npz file of plain arrays: {error}") from error
    packed = "params" in arrays
    tables = ("params", "inner") if packed else ("HP", "HA")
    needed = ("AP", "AA", *tables, *(("low",) if packed else ()))
    missing = [key for key in needed if key not in arrays]
    if missing:
        raise PolyampError(
            f"{path.name}: {_list(missing)} missing; a trace has AP, AA, HP, HA (in the compact"
            f" form AP, AA, params, inner, low); this file has {_list(arrays) or 'nothing'}"
        )
    _check_arrays(path.name, arrays, tables, packed)
    if packed:
        counts = [compact.decode(arrays[key].T) for key in tables]
        low, per_octave = int(arrays["low"]), 1
    else:
        counts = [arrays[key] for key in tables]
        low, per_octave = compact.LOW, compact.PER_OCTAVE
    amax, inner = (_known(arrays[key]) for key in ("AP", "AA"))
    return range_trace(path.stem, amax, inner, counts, low, per_octave)


def _check_arrays(
    name: str, arrays: Mapping[str, Any], tables: tuple[str, str], packed: bool
) -> None:
    for key in ("AP", "AA"):
        array = arrays[key]
        if array.ndim != 1 or array.dtype.kind not in "fiu" or not len(array):
            raise PolyampError(f"{name}: {key} must be numbers (steps,), got {_shape(array)}")
        if (array < 0).any():
            raise PolyampError(f"{name}: {key} is negative at step {int((array < 0).argmax())}")
    steps = len(arrays["AP"])
    bins = arrays[tables[0]].shape[:1] if packed else (compact.OCTAVES * compact.PER_OCTAVE,)
    wanted = (*bins, steps) if packed else (steps, *bins)
    for key in tables:
        array = arrays[key]
        if array.shape != wanted or array.dtype.kind not in ("u" if packed else "iu"):
            raise PolyampError(f"{name}: {key} must be counts {wanted}, got {_shape(array)}")
        if (array < 0).any():
            raise PolyampError(f"{name}: {key} has a negative count")
    if arrays["AA"].shape != (steps,):
        raise PolyampError(f"{name}: AA must be numbers ({steps},), got {_shape(arrays['AA'])}")
    if packed and (arrays["low"].shape != () or arrays["low"].dtype.kind not in "iu"):
        raise PolyampError(f"{name}: low must be one integer, got {_shape(arrays['low'])}")


def _read_csv(path: Path) -> Trace:
    import csv

    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = [(i, [cell.strip() for cell in row]) for i, row in enumerate(csv.reader(file), 1)]
    lines = [(i, cells) for i, cells in lines if any(cells)]
    if not lines:
        raise PolyampError(f"{path.name} is empty")
    names = [cell.lower() for cell in lines[0][1]]
    if not {"amax", *FLAGS} & set(names):
        if len(names) > 1 or names[0] not in _TRUTHS:
            raise PolyampError(
                f"{path.name}: the header must name amax or one of {_list(FLAGS)}, or every line"
                f" be one flag 0 or 1; the first line is {','.join(lines[0][1])!r}"
            )
        names = ["overflow"]
    else:
        del lines[0]
    for i, cells in lines:
        if len(cells) != len(names):
            raise PolyampError(
                f"{path.name}, line {i}: {len(cells)} columns where {len(names)} are expected"
            )
    return _from_records(path, ((i, dict(zip(names, row, strict=True))) for i, row in lines))


def _read_jsonl(path: Path) -> Trace:
    def records() -> Iterable[tuple[int, Mapping[str, Any]]]:
        for i, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise PolyampError(f"{path.name}, line {i} is not JSON: {error}") from error
            if not isinstance(record, dict):
                raise PolyampError(f"{path.name}, line {i} is not a JSON object: {line[:60]}")
            yield i, record

    return _from_records(path, records())


def _from_records(path: Path, records: Iterable[tuple[int, Mapping[str, Any]]]) -> Trace:
    """A trace from one mapping a step; the first says which key is read."""
    import numpy as np

    rows = list(records)
    if not rows:
        raise PolyampError(f"{path.name} has no steps")
    key = next((k for k in ("amax", *FLAGS) if k in rows[0][1]), None)
    if key is None:
        raise PolyampError(
            f"{path.name}, line {rows[0][0]}: none of amax, {_list(FLAGS)} is there; it has"
            f" {_list(rows[0][1])}"
        )
    if key != "amax":
        flags = [_flag(path, i, key, row) is FLAGS[key] for i, row in rows]
        return OverflowTrace(path.stem, np.array(flags))
    amax = [_magnitude(path, i, "amax", row) for i, row in rows]
    if "inner" not in rows[0][1]:
        return range_trace(path.stem, amax)
    return range_trace(path.stem, amax, [_magnitude(path, i, "inner", row) for i, row in rows])


def _flag(path: Path, line: int, key: str, row: Mapping[str, Any]) -> bool:
    if key not in row:
        raise PolyampError(
            f"{path.name}, line {line}: {key} is missing; it is there in the first step"
        )
    value = row[key]
    found = _TRUTHS.get(str(value).lower())
    if found is None:
        raise PolyampError(f"{path.name}, line {line}: {key} must be 0 or 1, got {value!r}")
    return found


def _magnitude(path: Path, line: int, key: str, row: Mapping[str, Any]) -> float:
    where = f"{path.name}, line {line}"
    if key not in row:
        raise PolyampError(f"{where}: {key} is missing; it is there in the first step")
    value = row[key]
    if value is None or (isinstance(value, str) and value.lower() in ("", "null", "none")):
        return math.inf
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise PolyampError(f"{where}: {key} must be a number, got {value!r}") from None
    if number < 0:
        raise PolyampError(f"{where}: {key} must not be negative, got {value!r}")
    return math.inf if math.isnan(number) else number


def _known(array: Any) -> Any:
    import numpy as np

    return np.where(np.isnan(array), np.inf, array)


def _shape(array: Any) -> str:
    return f"{array.dtype} {array.shape}"


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)
