"""Partitions: every row is in one shard, shards have the promised length, and results come back in order."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcontroller.errors import DataError
from mcontroller.partition import Partition, balanced, contiguous, padded, split_rows
from tests.parallel_state.layouts import unhurried

PADDINGS = ("spread", "repeat", "zero_loss", "none")
counts = st.integers(0, 70)
shard_counts = st.integers(1, 12)
row_lengths = st.lists(st.integers(0, 500), max_size=60)


def all_rows(partition: Partition) -> list[int]:
    return [row for shard in range(len(partition.shards)) for row in partition.unpadded_rows(shard)]


def collected(partition: Partition, times: int = 1) -> list[tuple[int, int]]:
    """Return the caller's result of a method that returns ``times`` entries (row, number) for every row."""
    results = [[(row, number) for row in rows for number in range(times)] for rows in partition.shards]
    keep, order = partition.restore([len(result) for result in results])
    joined = [entry for result, kept in zip(results, keep, strict=True) for entry in result[:kept]]
    return joined if order is None else [joined[position] for position in order]


@unhurried
@given(counts, shard_counts)
def test_contiguous_shards_are_ranges_that_differ_by_at_most_one_row(n: int, k: int) -> None:
    partition = contiguous(n, k)
    sizes = [len(rows) for rows in partition.shards]
    assert [row for rows in partition.shards for row in rows] == list(range(n))
    assert max(sizes) - min(sizes) <= 1
    assert partition.order is None and not any(partition.pads)


@unhurried
@given(st.integers(1, 70), shard_counts)
def test_padded_shards_have_equal_length_and_at_most_one_row_of_padding(n: int, k: int) -> None:
    partition = padded(n, k)
    assert {len(rows) for rows in partition.shards} == {-(-n // k)}
    assert max(partition.pads) <= 1
    assert all_rows(partition) == list(range(n))
    assert all(isinstance(rows, range) for rows in partition.shards)
    assert all(0 <= row < n for rows in partition.shards for row in rows)


@unhurried
@given(st.integers(1, 70), shard_counts)
def test_by_default_no_shard_is_empty_and_rows_are_repeated_only_for_that(n: int, k: int) -> None:
    partition = split_rows(n, k)
    assert all(partition.shards)
    assert sum(partition.pads) == max(k - n, 0)
    assert all_rows(partition) == list(range(n))


@pytest.mark.parametrize("padding", PADDINGS)
def test_no_rows_give_empty_shards_whatever_the_padding(padding: str) -> None:
    partition = split_rows(0, 3, padding=padding)
    assert [list(rows) for rows in partition.shards] == [[], [], []]
    assert partition.pads == (0, 0, 0)
    assert partition.restore([0, 0, 0]) == ((0, 0, 0), None)


def test_zero_loss_marks_the_partition_and_repeat_does_not() -> None:
    assert split_rows(5, 2, padding="zero_loss").zero_loss
    assert not split_rows(5, 2, padding="repeat").zero_loss
    assert balanced([3, 1, 2], 2, padding="zero_loss").zero_loss


@unhurried
@given(row_lengths, shard_counts, st.sampled_from(PADDINGS), st.booleans(), st.integers(0, 3))
def test_results_come_back_in_the_callers_order_without_padding(
    lengths: list[int], k: int, padding: str, by_length: bool, times: int
) -> None:
    n = len(lengths)
    partition = split_rows(n, k, padding=padding, lengths=lengths if by_length else None)
    assert sorted(all_rows(partition)) == list(range(n))
    assert collected(partition, times) == [(row, number) for row in range(n) for number in range(times)]


@unhurried
@given(row_lengths, shard_counts, st.sampled_from(PADDINGS))
def test_padding_is_at_the_end_of_a_shard_and_repeats_a_row_of_the_batch(
    lengths: list[int], k: int, padding: str
) -> None:
    partition = balanced(lengths, k, padding=padding)
    for shard, rows in enumerate(partition.shards):
        assert len(rows) == len(partition.unpadded_rows(shard)) + partition.pads[shard]
        assert set(rows) <= set(range(len(lengths)))
    if lengths and padding != "none":
        assert all(partition.shards)
    if padding in ("repeat", "zero_loss"):
        assert len({len(rows) for rows in partition.shards}) == 1


@unhurried
@given(st.lists(st.tuples(st.integers(1, 500), st.sampled_from("abcdefg")), max_size=60), shard_counts)
def test_rows_of_one_group_stay_in_one_shard(rows: list[tuple[int, str]], k: int) -> None:
    labels = [label for _, label in rows]
    partition = balanced([length for length, _ in rows], k, labels)
    shards_of: dict[str, set[int]] = {}
    for shard in range(k):
        for row in partition.unpadded_rows(shard):
            shards_of.setdefault(labels[row], set()).add(shard)
    assert all(len(shards) == 1 for shards in shards_of.values())
    assert collected(partition) == [(row, 0) for row in range(len(rows))]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), max_size=40), st.integers(1, 6))
@unhurried
def test_rows_of_each_label_are_balanced_at_equal_numbers(rows: list[tuple[int, int]], k: int) -> None:
    lengths, labels = [length for length, _ in rows], [label for _, label in rows]
    partition = split_rows(len(rows), k, padding="none", lengths=lengths, within=labels)
    assert sorted(all_rows(partition)) == list(range(len(rows)))
    for label in set(labels):
        counts = [sum(labels[row] == label for row in partition.shards[shard]) for shard in range(k)]
        assert max(counts) - min(counts) <= 1
    assert max(map(len, partition.shards)) - min(map(len, partition.shards)) <= 1


def test_groups_of_equal_size_stay_in_the_callers_order_and_are_views() -> None:
    labels = [f"prompt-{row // 4}" for row in range(32)]
    partition = split_rows(32, 4, groups=labels)
    assert partition.shards == (range(0, 8), range(8, 16), range(16, 24), range(24, 32))
    assert partition.order is None


def realistic(kind: str, n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    draw = {
        "lognormal": lambda: min(4096, max(16, int(rng.lognormvariate(6.0, 0.7)))),
        "uniform": lambda: rng.randint(128, 4096),
        "one third at the limit": lambda: 4096 if rng.random() < 0.3 else rng.randint(100, 3000),
    }[kind]
    return [draw() for _ in range(n)]


def overweight(partition: Partition, lengths: Sequence[int], equal_size: bool) -> float:
    """Return by how much the heaviest shard exceeds the mean, or the least weight of the shard of the longest row."""
    shards = [[lengths[row] for row in partition.unpadded_rows(shard)] for shard in range(len(partition.shards))]
    others = len(lengths) // len(shards) - 1 if equal_size else 0
    unavoidable = max(lengths) + sum(sorted(lengths)[:others])
    return max(map(sum, shards)) / max(sum(lengths) / len(shards), unavoidable) - 1


@pytest.mark.parametrize("equal_size", [False, True])
@pytest.mark.parametrize(("n", "k"), [(64, 8), (256, 16), (512, 64), (1024, 8), (4096, 256)])
@pytest.mark.parametrize("kind", ["lognormal", "uniform", "one third at the limit"])
def test_the_heaviest_shard_is_at_most_two_percent_over_the_mean(kind: str, n: int, k: int, equal_size: bool) -> None:
    for seed in range(3):
        lengths = realistic(kind, n, seed)
        within = [0] * n if equal_size else None
        assert overweight(balanced(lengths, k, within=within), lengths, equal_size) <= 0.02


def test_few_rows_per_shard_are_balanced_as_well_as_any_partition_can_be() -> None:
    lengths = [8, 7, 6, 5, 4]  # 8 + 7 against 6 + 5 + 4: the greedy choice would end at 17
    partition = balanced(lengths, 2)
    assert balanced([length / 16 for length in lengths], 2) == partition
    assert sorted(sum(lengths[row] for row in partition.unpadded_rows(shard)) for shard in range(2)) == [15, 15]


def test_each_shard_keeps_the_callers_order_and_the_choice_is_repeatable() -> None:
    lengths = realistic("lognormal", 200, 7)
    partition = balanced(lengths, 8)
    assert all(list(rows) == sorted(rows) for rows in partition.shards)
    assert partition == balanced(lengths, 8)


def test_results_of_any_length_are_accepted_without_padding_and_in_order() -> None:
    assert contiguous(5, 2).restore([7, 1]) == ((7, 1), None)


def test_results_that_cannot_be_restored_are_rejected_with_the_numbers() -> None:
    with pytest.raises(DataError) as raised:
        split_rows(5, 2, padding="repeat").restore([2, 3])
    assert (raised.value.shard, raised.value.sent, raised.value.returned) == (0, 3, 2)


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ({"n": -1, "k": 2}, {"rows": -1, "shards": 2}),
        ({"n": 4, "k": 0}, {"rows": 4, "shards": 0}),
        ({"n": 4, "k": 0, "padding": "repeat"}, {"rows": 4, "shards": 0}),
        ({"n": 4, "k": 2, "lengths": [1, 2, 3]}, {"lengths": 3, "rows": 4}),
        ({"n": 3, "k": 2, "lengths": [1, -2, 3]}, {"row": 1, "length": -2}),
        ({"n": 3, "k": 2, "groups": ["a", "b"]}, {"groups": 2, "rows": 3}),
    ],
)
def test_numbers_that_do_not_agree_are_rejected(arguments: dict, fields: dict) -> None:
    with pytest.raises(DataError) as raised:
        split_rows(**arguments)
    assert raised.value.fields == fields
    with pytest.raises(DataError) as raised:
        contiguous(4, 2).restore([1, 2, 1])
    assert raised.value.fields == {"lengths": (1, 2, 1), "shards": 2}


def test_rows_over_2048_shards_are_ranges_and_results_need_no_order() -> None:
    partition = split_rows(100_000, 2048, padding="repeat")
    restored = partition.restore([len(rows) for rows in partition.shards])
    assert restored.order is None
    assert all(isinstance(rows, range) for rows in partition.shards)


@pytest.mark.processes
def test_the_module_loads_neither_torch_nor_ray_nor_numpy() -> None:
    script = "import sys, mcontroller.partition; print(sorted({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
