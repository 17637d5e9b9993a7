"""Patch Megatron's rotary positions of packed rows to compute on the device, without values on the host.

Megatron reads the bounds of the rows on the host, twice for queries and twice for keys in every layer. On a GPU the
host waits there until all earlier kernels have finished. ``apply_rope_fusion`` does not wait, but needs Transformer
Engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel_state.patches.import_hook import Patch


def packed_positions(bounds: Tensor, tokens: int, cp: int, rank: int, *, offsets: bool = False) -> Tensor:
    """Return the position of each token of packed rows that a context-parallel rank has: int64 ``[tokens]``.

    Mirrors ``_get_thd_freqs_on_this_cp_rank`` of Megatron's ``rope_utils``.

    Args:
        bounds: ``[rows + 1]``, the start of every row over all ranks, and last the end; on any device.
        tokens: number of this rank's tokens.
        cp: size of the cp axis.
        rank: coordinate on the cp axis.
        offsets: count positions from the start of the first row, not from that of each row.
    """
    starts = bounds.long() // cp
    token = torch.arange(tokens, device=bounds.device)
    row = torch.searchsorted(starts[1:], token, right=True)
    within = token - starts[row]
    if cp > 1:
        piece = (starts[row + 1] - starts[row]) // 2
        within = within + torch.where(within < piece, rank, 2 * cp - 2 - rank) * piece
    return within + bounds[row] if offsets else within


def _rope_utils(module: Any) -> None:
    rotate = module._apply_rotary_pos_emb_bshd

    def rotate_packed(
        t: Tensor,
        cu_seqlens: Tensor,
        freqs: Tensor,
        *args: Any,
        cp_group: Any,
        max_seqlen: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Rotate the heads of packed rows.

        Args:
            t: ``[tokens, heads, width]``.
            cu_seqlens: int32 ``[rows + 1]``, the bounds of the rows.
            freqs: ``[positions, 1, 1, width]``: of the longest row, or of all tokens of all ranks.
            *args: those of ``_apply_rotary_pos_emb_bshd`` after the angles.
            cp_group: the context-parallel ranks.
            max_seqlen: tokens of the longest row, which 0.20 passes; not needed here.
            **kwargs: as ``args``.
        """
        of_all_tokens = freqs.size(0) == t.size(0) * cp_group.size()
        positions = packed_positions(cu_seqlens, t.size(0), cp_group.size(), cp_group.rank(), offsets=of_all_tokens)
        angles = freqs.index_select(0, positions)
        rotated: Tensor = rotate(t.unsqueeze(1), angles, *args, **kwargs).squeeze(1)
        return rotated

    module._apply_rotary_pos_emb_thd = rotate_packed


PATCHES: dict[str, Patch] = {"megatron.core.models.common.embeddings.rope_utils": _rope_utils}
"""Module name -> the function that patches it."""
