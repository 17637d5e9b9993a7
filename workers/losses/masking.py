"""Values outside of a mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel_state.lazy import Lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = Lazy("torch")


def inside(values: Tensor, mask: Tensor) -> Tensor:
    """Return values, and 0 for entries with a mask of 0, even if they are NaN."""
    return torch.where(mask.bool(), values, 0.0)
