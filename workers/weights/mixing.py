"""Move frozen weights towards a policy's by a share, in float32 whatever their precision.

A share of 0.01 of a difference is less than a weight of 16 bits can represent, so weights of 16 bits have a copy in
float32, which is moved and then rounded. It takes 4 bytes for every weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor, nn


def float32_copies(chunks: Sequence[nn.Module]) -> list[dict[str, Tensor]]:
    """Return copies in float32 of the weights and buffers of 16 bits, by name for every chunk."""
    return [
        {name: value.float() for name, value in chunk.state_dict().items() if _is_rounded(value)} for chunk in chunks
    ]


@torch.no_grad()
def mix_weights(
    frozen: Sequence[nn.Module], policy: Sequence[nn.Module], share: float, copies: list[dict[str, Tensor]]
) -> list[dict[str, Tensor]]:
    """Set ``frozen`` to ``share * policy + (1 - share) * frozen``: weights and persistent buffers.

    What is not a floating-point tensor, such as a count, is copied from the policy.

    Args:
        frozen: the chunks that move.
        policy: chunks of the same modules, wrapped or not.
        share: above 0; 1 copies the policy.
        copies: what the last call returned. Empty: ``frozen`` is exact as it is.

    Returns:
        The values of ``frozen`` in float32 (see ``float32_copies``), empty after a copy.
    """
    copies = [] if share == 1.0 else copies or float32_copies(frozen)
    for index, (target, source) in enumerate(zip(frozen, policy, strict=True)):
        moved, current = unwrap_model(source).state_dict(), target.state_dict()
        for name, value in moved.items() if copies else ():
            if isinstance(value, Tensor) and value.is_floating_point():
                moved[name] = copies[index].get(name, current[name]).lerp_(value.float(), share)
        target.load_state_dict(moved)
    return copies


def _is_rounded(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
