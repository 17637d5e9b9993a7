"""Slices travel in buckets within the limit, from the nearest rank; engines get whole tensors."""

from __future__ import annotations

from collections import defaultdict

import pytest

from workers.weights.fingerprints import dtypes_by_name
from workers.weights.moves import TensorPart, spans_of
from workers.weights.transfer.plan import RankWeights, ServedEngine, schedule_transfer

MIB = 1 << 20
ROWS, COLUMNS = 2048, 512  # 4 MiB in float32


def held(name: str, dim: int | None, ways: int, **changes: object) -> list[TensorPart]:
    """By rank, its part of a matrix [ROWS, COLUMNS]."""
    whole = TensorPart(name, (ROWS, COLUMNS), "float32", 4)
    if dim is None:
        return [whole._replace(**changes)] * ways
    size = whole.shape[dim]
    return [
        whole._replace(dim=dim, spans=spans_of(size // ways, 1, ways, rank, size), **changes) for rank in range(ways)
    ]


@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        (held("w", None, 1), held("w", None, 1)),
        (held("w", 0, 2), held("w", None, 1)),
        (held("w", 1, 2), held("w", None, 1)),
        (held("w", None, 1), held("w", 1, 2)),
        (held("w", None, 1), held("w", None, 1, dtype="bfloat16", itemsize=2)),
        (held("w", 0, 16), held("w", None, 1)),
    ],
    ids=["whole", "rows to whole", "columns to whole", "whole to columns", "converted", "small"],
)
def test_slices_travel_in_buckets_within_the_limit(sources: list[TensorPart], targets: list[TensorPart]) -> None:
    ranks = [[RankWeights((part,), "node", pid, "cpu") for pid, part in enumerate(side)] for side in (sources, targets)]
    schedule = schedule_transfer(*ranks, MIB)
    assert sum(schedule.routes.values()) == schedule.nbytes == ROWS * COLUMNS * targets[0].itemsize
    for bucket in schedule.buckets:
        nbytes: dict[int, int] = defaultdict(int)
        for move in bucket:
            nbytes[move.source_rank] += move.nbytes
            nbytes[move.target_rank] += move.nbytes
        assert max(nbytes.values()) <= MIB


def test_a_slice_comes_from_the_same_gpu_or_else_from_the_same_node() -> None:
    (whole,) = held("w", None, 1)
    places = [("one", "A"), ("one", "B"), ("other", "C"), ("other", "D")]
    sources = [RankWeights((whole,), node, pid, gpu) for pid, (node, gpu) in enumerate(places)]
    targets = [
        RankWeights((whole,), node, 10 + pid, gpu)
        for pid, (node, gpu) in enumerate([*reversed(places), ("other", "E"), ("third", "F")])
    ]
    routes = schedule_transfer(sources, targets, MIB).routes
    by_target = {target: source for source, target in routes}
    assert by_target | {4: 2} == {0: 3, 1: 2, 2: 1, 3: 0, 4: 2, 5: by_target[5]} and by_target[4] in (2, 3)
    assert all(nbytes == 4 * MIB for nbytes in routes.values())


def test_on_shared_gpus_a_rank_gets_all_slices_from_the_sender_on_its_gpu() -> None:
    """Each of two senders has half of the rows; each of three receivers wants all, and the third has no sender."""
    sources = [
        RankWeights((part,), "node", pid, gpu)
        for pid, (part, gpu) in enumerate(zip(held("w", 0, 2), "AB", strict=True))
    ]
    (whole,) = held("w", None, 1)
    targets = [RankWeights((whole,), "node", 10 + pid, gpu) for pid, gpu in enumerate("BAC")]
    schedule = schedule_transfer(sources, targets, MIB, relayed=True)
    peers = [{slices.peer for bucket in buckets for slices in bucket} for buckets in schedule.by_rank]
    assert peers == [{3, 4}, {2, 4}, {1}, {0}, {0, 1}]
    crossing = {(move.source_rank, move.target_rank) for bucket in schedule.exchanges for move in bucket}
    assert crossing == {(0, 1), (1, 0)}
    assert (
        [len(schedule.by_rank[rank]) for rank in range(2)]
        == [len(schedule.buckets)] * 2
        == [len(schedule.exchanges)] * 2
    )
    received = [sum(slices.nbytes for bucket in buckets for slices in bucket) for buckets in schedule.by_rank[2:]]
    assert received == [4 * MIB] * 3
    same = [
        target._replace(tensors=source.tensors, device=source.device)
        for source, target in zip(sources, targets[:2], strict=True)
    ]
    direct = schedule_transfer(sources, same, MIB, relayed=True)
    assert direct.relays == {} and direct.exchanges == ()


def test_engines_get_whole_tensors_each_complete_in_one_bucket() -> None:
    """Two engines in bfloat16; a float32 tensor of 4 MiB takes a whole bucket, and two small ones share one."""
    small = [
        [part._replace(name=name, shape=(64, COLUMNS), spans=part.spans[:0]) for part in held(name, None, 2)]
        for name in ("a", "b")
    ]
    large = held("model.layers.0.w", 0, 2)
    sources = [RankWeights((small[0][rank], large[rank], small[1][rank]), "node", rank, "cpu") for rank in range(2)]
    engine = ServedEngine("bfloat16", 2, MIB, (None, None))
    targets = [RankWeights((), "node", 10 + pid, "cpu", engine=engine if pid else None) for pid in range(3)]
    schedule = schedule_transfer(sources, targets, MIB)
    assert [[tensor.name for tensor in tensors] for tensors in schedule.targets] == [
        [],
        *[["a", "model.layers.0.w", "b"]] * 2,
    ]
    assert dtypes_by_name(schedule.targets) == {name: ["bfloat16"] for name in ("a", "b", "model.layers.0.w")}
    names = [{schedule.targets[1][move.target_slot].name for move in bucket} for bucket in schedule.buckets]
    assert names == [{"a"}, {"model.layers.0.w"}, {"b"}]
    for bucket in schedule.buckets:
        rows: dict[tuple[int, int], int] = defaultdict(int)
        for move in bucket:
            rows[move.target_rank, move.target_slot] += move.length
        assert all(count == schedule.targets[1][slot].shape[0] for (_, slot), count in rows.items())
        assert {target for target, _ in rows} == {3, 4}  # ranks are counted over both groups
    assert schedule.nbytes == 2 * 2 * COLUMNS * (ROWS + 2 * 64)
