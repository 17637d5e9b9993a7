"""Which rows begin with the prompt of the row before; responses to one prompt are neighbors in a batch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["repeats_prompt"]


def repeats_prompt(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Return whether each row begins with the prompt of the row before: bool ``[rows]``, false for the first.

    Args:
        tokens: int64 ``[rows, seq]``, each row from column 0; what follows the prompt is not compared.
        lengths: int64 ``[rows]``, tokens of each prompt.
    """
    behind = torch.arange(tokens.size(1), device=tokens.device) >= lengths[1:, None]
    repeats = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    repeats[1:] = ((tokens[1:] == tokens[:-1]) | behind).all(1) & (lengths[1:] == lengths[:-1])
    return repeats
