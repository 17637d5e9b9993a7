"""Packed rows follow each other, and each row is split in zigzag over the cp axis."""

from __future__ import annotations

import torch

from workers.train.packing import packing_of


def test_rows_follow_each_other_rounded_up_to_the_multiple() -> None:
    packing = packing_of(torch.tensor([5, 8, 1]), multiple=4)
    assert packing.bounds.tolist() == [0, 8, 16, 20]
    assert (packing.total, packing.longest) == (20, 8)
    params = packing.params()
    assert params.cu_seqlens_q.dtype == torch.int32  # as Transformer Engine's kernels take it
    # The same objects: Transformer Engine takes others for padding between rows, and leaves FlashAttention 2 out.
    assert params.cu_seqlens_q_padded is params.cu_seqlens_q and params.cu_seqlens_kv_padded is params.cu_seqlens_kv
    assert (params.qkv_format, params.max_seqlen_q, params.max_seqlen_kv) == ("thd", 8, 8)
