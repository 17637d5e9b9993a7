"""Moves of weights from layout to layout: their bytes and buckets, and the models that are rejected."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcontroller.errors import DataError
from tests.parallel_state.layouts import unhurried
from workers.weights.moves import (
    Move,
    Span,
    TensorPart,
    plan_buckets,
    spans_of,
)


class Schedule(NamedTuple):
    """Moves within ranks, moves from rank to rank in buckets, and the bytes of the latter."""

    copies: list[Move]
    buckets: tuple[tuple[Move, ...], ...]
    sent_bytes: int


def schedule_of(sources: list[list[TensorPart]], targets: list[list[TensorPart]], bucket_bytes: int) -> Schedule:
    planned = plan_buckets(sources, targets, bucket_bytes)
    copies = [move for move in chain(*planned) if move.source_rank == move.target_rank]
    sent = (tuple(move for move in bucket if move.source_rank != move.target_rank) for bucket in planned)
    buckets = tuple(filter(None, sent))
    return Schedule(copies, buckets, sum(move.nbytes for move in chain(*buckets)))


def cut(rows: int, ranks: int, ways: int, pieces: int = 1, dtype: str = "float32") -> list[list[TensorPart]]:
    """By rank, its part of one matrix [rows, 4] that is divided into ``ways`` parts, padded, with replicas."""
    padded = -(-rows // (ways * pieces)) * ways * pieces
    whole = TensorPart("weight", (rows, 4), dtype, 4)
    spans = [spans_of(padded // ways, pieces, ways, rank % ways, rows) for rank in range(ranks)]
    return [[whole._replace(dim=0, spans=part)] for part in spans]


def sent_by(schedule: Schedule, rank: int) -> int:
    return sum(move.nbytes for move in chain(*schedule.buckets) if move.source_rank == rank)


def indices(tensors: list[TensorPart]) -> set[int]:
    return {index for span in tensors[0].spans for index in range(span.start, span.stop)}


def check_moves(schedule: Schedule, sources: list[list[TensorPart]], targets: list[list[TensorPart]]) -> None:
    """Run the schedule on the indices themselves: each must end at its position in the target."""

    def places(held: TensorPart) -> np.ndarray:
        length = max((span.offset + span.stop - span.start for span in held.spans), default=0)
        indices = np.full(length, -1)
        for span in held.spans:
            indices[span.offset : span.offset + span.stop - span.start] = range(span.start, span.stop)
        return indices

    have, received = [places(held[0]) for held in sources], [np.full_like(places(held[0]), -1) for held in targets]
    for move in chain(schedule.copies, *schedule.buckets):
        part = have[move.source_rank][move.source_start : move.source_start + move.length]
        received[move.target_rank][move.target_start : move.target_start + move.length] = part
    assert [indices.tolist() for indices in received] == [places(held[0]).tolist() for held in targets]


@unhurried
@given(
    blocks=st.integers(1, 6),
    missing=st.integers(0, 3),
    ways=st.sampled_from([(a, b) for a in (1, 2, 4, 8) for b in (1, 2, 4, 8)]),
    pieces=st.sampled_from([1, 2]),
    limit=st.sampled_from([16, 40, 1 << 20]),
)
def test_every_index_arrives_at_its_position(
    blocks: int, missing: int, ways: tuple[int, int], pieces: int, limit: int
) -> None:
    rows = blocks * 16 - (missing if pieces == 1 else 0)  # gated units have no padding
    sources, targets = cut(rows, 8, ways[0], pieces), cut(rows, 8, ways[1], pieces)
    schedule = schedule_of(sources, targets, limit)
    check_moves(schedule, sources, targets)
    held, wanted = (
        [{i for s in of[0].spans for i in range(s.start, s.stop)} for of in model] for model in (sources, targets)
    )
    assert schedule.sent_bytes == sum(16 * len(want - have) for have, want in zip(held, wanted, strict=True))


def test_replicas_share_the_sending() -> None:
    """Rank 0 to 3 have the whole, rank 4 to 7 nothing."""
    part = TensorPart("weight", (12, 4), "float32", 4, 0, (Span(0, 12, 0),))
    nothing: list[TensorPart] = []
    schedule = schedule_of([[part]] * 4 + [nothing] * 4, [nothing] * 4 + [[part]] * 4, 1 << 20)
    assert [sent_by(schedule, rank) for rank in range(8)] == [192] * 4 + [0] * 4


def test_ranks_receive_side_by_side_and_not_one_after_another() -> None:
    schedule = schedule_of(cut(64, 8, 8), cut(64, 8, 1), 128)
    assert len(schedule.buckets) == 7  # 56 rows to each rank, 8 at a time
    assert all(len({move.target_rank for move in bucket}) == 8 for bucket in schedule.buckets)


def test_a_bucket_has_one_dtype() -> None:
    both: list[list[TensorPart]] = [
        [*one, *(held._replace(name="bias") for held in two)]
        for one, two in zip(cut(16, 2, 2), cut(16, 2, 2, dtype="bfloat16"), strict=True)
    ]
    whole = [[held._replace(dim=None, spans=()) for held in both[0]] for _ in both]
    schedule = schedule_of(both, whole, 1 << 20)
    assert [{move.dtype for move in bucket} for bucket in schedule.buckets] == [{"bfloat16"}, {"float32"}]


def test_of_one_pair_of_ranks_the_order_is_the_same_on_both_sides() -> None:
    schedule = schedule_of(cut(64, 8, 4, pieces=2), cut(64, 8, 2, pieces=2), 64)
    for bucket in schedule.buckets:
        by_pair: dict[tuple[int, int], list[Move]] = defaultdict(list)
        for move in bucket:
            by_pair[move.source_rank, move.target_rank].append(move)
        going = [m for rank in range(8) for m in sorted(bucket, key=lambda m: m.target_rank) if m.source_rank == rank]
        coming = [m for rank in range(8) for m in sorted(bucket, key=lambda m: m.source_rank) if m.target_rank == rank]
        for pair, moves in by_pair.items():
            for side in (going, coming):
                assert [m for m in side if (m.source_rank, m.target_rank) == pair] == moves


def test_another_model_is_rejected_with_the_names() -> None:
    head = TensorPart("head", (8, 4), "float32", 4)
    with pytest.raises(DataError) as caught:
        schedule_of(cut(16, 2, 2), [[*held, head] for held in cut(18, 2, 2)], 64)
    assert caught.value.missing == ["head"]  # type: ignore[attr-defined]
    assert caught.value.differing == ["weight is [16, 4], the model's is [18, 4]"]  # type: ignore[attr-defined]


def test_a_part_that_no_rank_has_is_rejected_with_its_name() -> None:
    with pytest.raises(DataError) as caught:
        schedule_of([*cut(16, 2, 2)[:1], []], cut(16, 2, 1), 64)
    assert caught.value.name == "weight"  # type: ignore[attr-defined]


def test_a_tensor_divided_along_two_dims_is_rejected_with_its_name() -> None:
    across = [[TensorPart("weight", (16, 4), "float32", 4, 1, (Span(0, 4, 0),))]] * 2
    with pytest.raises(DataError) as caught:
        schedule_of(cut(16, 2, 2), across, 64)
    assert caught.value.name == "weight"  # type: ignore[attr-defined]
