"""Balanced partitions and micro-batches under the names of ported code."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from mcontroller.errors import DataError
from mcontroller.porting import (
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    log_seqlen_unbalance,
    rearrange_micro_batches,
    roundup_divisible,
)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=24), st.integers(1, 6), st.booleans())
def test_every_row_is_in_one_partition_and_none_is_empty(lengths: list[int], count: int, equal: bool) -> None:
    count = min(count, len(lengths))
    lengths = lengths[: len(lengths) // count * count]
    partitions = get_seqlen_balanced_partitions(lengths, count, equal)
    assert sorted(row for partition in partitions for row in partition) == list(range(len(lengths)))
    assert all(partition == sorted(partition) and partition for partition in partitions)
    assert not equal or {len(partition) for partition in partitions} == {len(lengths) // count}


def test_wrong_numbers_of_partitions_are_rejected() -> None:
    with pytest.raises(DataError, match="3 rows in 4 partitions"):
        get_seqlen_balanced_partitions([1, 2, 3], 4, False)
    with pytest.raises(DataError, match="a divisor of the rows"):
        get_seqlen_balanced_partitions([1, 2, 3], 2, True)


def test_the_balance_is_reported_before_and_after() -> None:
    metrics = log_seqlen_unbalance([8, 8, 1, 1], [[0, 2], [1, 3]], "seqlen")
    assert metrics == {
        "seqlen/min": 2,
        "seqlen/max": 16,
        "seqlen/minmax_diff": 14,
        "seqlen/balanced_min": 9,
        "seqlen/balanced_max": 9,
        "seqlen/mean": 9.0,
    }


def test_micro_batches_hold_every_row_once_and_about_the_tokens_asked_for() -> None:
    lengths = torch.tensor([8, 1, 1, 6, 2, 4])
    mask = (torch.arange(8) < lengths[:, None]).long()
    batch = TensorDict({"attention_mask": mask, "n": torch.arange(6)}, [6])
    parts, rows = rearrange_micro_batches(batch, max_token_len=8)
    assert len(parts) == 3 and [part["n"].tolist() for part in parts] == rows
    order = torch.tensor(get_reverse_idx([row for part in rows for row in part]))
    assert torch.cat([part["n"] for part in parts])[order].tolist() == list(range(6))
    assert len(rearrange_micro_batches(batch, 8, num_batches_divided_by=2)[0]) == roundup_divisible(3, 2) == 4
    assert len(rearrange_micro_batches(batch, 64, min_num_micro_batch=2)[0]) == 2
    with pytest.raises(DataError, match="max_token_len is 4 for sequences of 8 tokens"):
        rearrange_micro_batches(batch, 4)
