"""TensorDict, loaded when one is first made: a process that only computes on columns does without its 30 MB and 1.4 s.

Nothing can be a TensorDict where the package has not been loaded, so asking never loads it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict, TensorDictBase
    from typing_extensions import TypeIs

__all__ = ["is_memory_mapped", "is_tensordict", "is_tensordict_base", "is_tensordict_itself", "make_tensordict"]


def is_tensordict(value: object) -> TypeIs[TensorDict]:
    package = sys.modules.get("tensordict")
    return package is not None and isinstance(value, package.TensorDict)


def is_tensordict_itself(value: object) -> TypeIs[TensorDict]:
    """Whether it is a TensorDict, and not of a class made from it."""
    package = sys.modules.get("tensordict")
    return package is not None and type(value) is package.TensorDict


def is_tensordict_base(value: object) -> TypeIs[TensorDictBase]:
    """Whether it is a TensorDict or a relative of it: a lazy stack, a NonTensorStack, a tensorclass."""
    package = sys.modules.get("tensordict")
    return package is not None and isinstance(value, package.TensorDictBase)


def is_memory_mapped(value: object) -> bool:
    package = sys.modules.get("tensordict")
    return package is not None and type(value) is package.MemoryMappedTensor


def make_tensordict(
    columns: Mapping[Any, Any], batch_size: tuple[int, ...], device: torch.device | None = None, *, check: bool = True
) -> TensorDict:
    """A TensorDict of these columns; ``check=False`` takes the caller's word that they fit."""
    import torch
    from tensordict import TensorDict

    size: Any = torch.Size(batch_size)
    if check:
        return TensorDict(dict(columns), batch_size=size, device=device)
    return TensorDict._new_unsafe(dict(columns), batch_size=size, device=device)
