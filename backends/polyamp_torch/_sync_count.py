"""Count the operations that make the host wait for the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {
    "aten::_local_scalar_dense",  # item(), bool(), float(), int(), an index, is_nonzero
    "aten::is_nonzero",
    "aten::equal",
    "aten::allclose",
    "aten::nonzero",  # where(condition), and below a boolean mask
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::repeat_interleave",
}
_COPIES = {"aten::_to_copy", "aten::copy_"}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_"}
_MASKS = {torch.bool, torch.uint8}


class SyncCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts host syncs in its `with` block.

        with SyncCount() as syncs:
            scaler.step(optimizer)
        syncs.count, syncs.names

    It counts operations that wait for the device when their tensors are there: reading a value,
    a result whose shape depends on values, a blocking copy between devices. It goes by operation,
    so the first two are seen on CPU tensors as well, where they cost nothing. Not seen on CPU
    tensors: `tolist()` and `numpy()`, which read memory without an operation (on an accelerator
    they are a copy, and seen); `torch.cuda.synchronize()` never is.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    @property
    def count(self) -> int:
        """Host syncs so far."""
        return len(self.names)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation as it is, and note its name if it is a sync."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name
        if (
            name in _READS
            or (name in _COPIES and _is_blocking(name, args, kwargs, result))
            or (name in _INDEXING and _has_mask(args[1]))
        ):
            self.names.append(name)
        return result


def _is_blocking(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
    source = args[1] if name == "aten::copy_" else args[0]
    third = len(args) > 2 and args[2]
    waits = not kwargs.get("non_blocking", third if name == "aten::copy_" else False)
    return waits and source.device != result.device


def _has_mask(indices: Sequence[Any]) -> bool:
    return any(isinstance(i, torch.Tensor) and i.dtype in _MASKS for i in indices)
