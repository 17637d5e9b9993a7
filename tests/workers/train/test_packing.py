"""Packed rows follow each other, and each row is split in zigzag over the cp axis."""

from __future__ import annotations

import pytest
import torch

from workers.train.packing import packing_of
from workers.zigzag import zigzag_positions


def test_rows_follow_each_other_rounded_up_to_the_multiple() -> None:
    packing = packing_of(torch.tensor([5, 8, 1]), multiple=4)
    assert packing.bounds.tolist() == [0, 8, 16, 20]
    assert (packing.total, packing.longest) == (20, 8)
    params = packing.params()
    assert params.cu_seqlens_q.dtype == torch.int32  # as Transformer Engine's kernels take it
    # The same objects: Transformer Engine takes others for padding between rows, and leaves FlashAttention 2 out.
    assert params.cu_seqlens_q_padded is params.cu_seqlens_q and params.cu_seqlens_kv_padded is params.cu_seqlens_kv
    assert (params.qkv_format, params.max_seqlen_q, params.max_seqlen_kv) == ("thd", 8, 8)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_rank_has_its_zigzag_part_of_every_row(cp: int) -> None:
    packing = packing_of(torch.tensor([5, 16, 1]), multiple=2 * cp)
    for rank in range(cp):
        row, column = packing.tokens_of_rank(cp, rank)
        expected = [(at, length) for at, length in enumerate(packing.lengths.tolist())]
        assert row.tolist() == [at for at, length in expected for _ in range(length // cp)]
        assert torch.equal(column, torch.cat([zigzag_positions(length, cp, rank) for _, length in expected]))


def test_odd_length_needs_no_rounding_without_context_parallelism() -> None:
    row, column = packing_of(torch.tensor([3, 1])).tokens_of_rank(1, 0)
    assert (row.tolist(), column.tolist()) == ([0, 0, 0, 1], [0, 1, 2, 0])
