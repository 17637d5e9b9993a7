"""Use TensorDict without importing the package before one is needed.

Importing tensordict costs 1.4 s and 30 MB, which a process that only computes on columns avoids. As long as the package
is not imported, no value can be a TensorDict, so the checks below never import it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict, TensorDictBase
    from typing_extensions import TypeIs


def is_tensordict(value: object) -> TypeIs[TensorDict]:
    """Return whether a value is a TensorDict."""
    package = sys.modules.get("tensordict")
    return package is not None and isinstance(value, package.TensorDict)


def is_tensordict_itself(value: object) -> bool:
    """Return whether a value is a TensorDict and not an instance of a subclass."""
    package = sys.modules.get("tensordict")
    return package is not None and type(value) is package.TensorDict


def is_tensordict_base(value: object) -> TypeIs[TensorDictBase]:
    """Return whether a value is a TensorDict or a relative of it: a lazy stack, a NonTensorStack, a tensorclass."""
    package = sys.modules.get("tensordict")
    return package is not None and isinstance(value, package.TensorDictBase)


def is_memory_mapped(value: object) -> bool:
    """Return whether a value is tensordict's MemoryMappedTensor."""
    package = sys.modules.get("tensordict")
    return package is not None and type(value) is package.MemoryMappedTensor


def make_tensordict(
    columns: Mapping[Any, Any], batch_size: Sequence[int], device: torch.device | None = None, *, check: bool = True
) -> TensorDict:
    """Make a TensorDict from these columns.

    Args:
        columns: tensors and nested TensorDicts by name.
        batch_size: the leading dims that all columns share.
        device: the device of all columns; None leaves each column where it is.
        check: whether TensorDict checks the batch dims of every column. Pass False only for columns that
            agree.
    """
    import torch
    from tensordict import TensorDict

    size: Any = torch.Size(batch_size)
    if check:
        return TensorDict(dict(columns), batch_size=size, device=device)
    return TensorDict._new_unsafe(dict(columns), batch_size=size, device=device)  # no public constructor skips checks
