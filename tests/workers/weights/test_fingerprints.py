"""Fingerprints are the same in every layout and change with every element; those of two sides are compared."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.workers.weights.models import EXPERTS, MODEL, TIED, built
from workers.config import ModelConfig
from workers.weights.fingerprints import (
    Fingerprint,
    Verification,
    WeightsNotArrived,
    shard_fingerprints,
    tensor_fingerprints,
    whole_fingerprints,
)
from workers.weights.hf.model import hf_tensors
from workers.weights.hf.names import hf_shards, model_family
from workers.weights.moves import Span, TensorPart
from workers.weights.shards import WeightShard, model_shards, whole_shard

Axes = dict[str, Any]
PLAIN_EXPERTS = dataclasses.replace(EXPERTS, transformer={})


def value_of(tensor: torch.Tensor, dtype: str | None = None) -> int:
    return shard_fingerprints([whole_shard("weight", tensor)], {"weight": [dtype]} if dtype else None)[0].value


def key(dim: int, index: int) -> int:
    mask = (1 << 64) - 1
    mixed = ((index + 1) * 0x9E3779B97F4A7C15 + dim + 1) & mask
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & mask
    return (mixed ^ mixed >> 31) | 1


def expected_sum(tensor: torch.Tensor) -> int:
    """The definition, with Python's integers: bits of a float32 as a signed number."""
    rows = tensor.view(torch.int32).tolist()
    elements = ((bits, row, column) for row, values in enumerate(rows) for column, bits in enumerate(values))
    return sum(bits * key(0, row) * key(1, column) for bits, row, column in elements) % (1 << 64)


def test_value_is_the_sum_of_all_bits_times_the_keys_of_their_indices() -> None:
    tensor = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    assert value_of(tensor) % (1 << 64) == expected_sum(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_every_changed_or_exchanged_element_changes_the_value(dtype: torch.dtype) -> None:
    tensor = torch.linspace(-2, 2, 30).view(5, 6).to(dtype)
    before, whole = tensor.clone(), value_of(tensor)
    assert torch.equal(tensor.view(torch.int8), before.view(torch.int8))
    flat = tensor.view(-1)
    for index in range(30):
        changed = tensor.clone()
        one = changed.view(-1)[index : index + 1].view(torch.uint8)
        one[0] ^= 1  # the lowest bit
        assert value_of(changed) != whole
        for other in range(index):
            if flat[index] != flat[other]:
                exchanged = tensor.clone()
                exchanged.view(-1)[index], exchanged.view(-1)[other] = flat[other], flat[index]
                assert value_of(exchanged) != whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_numbers_that_a_kernel_may_compute_with_as_zero_count_as_zero(dtype: torch.dtype) -> None:
    whole = torch.linspace(-2, 2, 5).to(dtype)  # with a zero in the middle
    zeros = [whole.clone() for _ in range(3)]
    smallest = torch.finfo(dtype).smallest_normal
    for tensor, value in zip(zeros, (-0.0, smallest / 2, smallest), strict=True):
        tensor[2] = value
    flushed = dtype in (torch.float32, torch.bfloat16)
    assert (value_of(zeros[0]) == value_of(whole)) == (dtype != torch.float64)
    assert (value_of(zeros[1]) == value_of(whole)) == flushed
    assert value_of(zeros[2]) != value_of(whole)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_sums_of_the_parts_are_the_value_of_the_whole_tensor(dim: int) -> None:
    whole = torch.randn(8, 12, 4, generator=torch.Generator().manual_seed(2))
    size, of_ranks = whole.size(dim), []
    for start, stop in ((0, 1), (1, size - 1), (size - 1, size)):
        tensor = torch.cat([torch.zeros_like(whole), whole], dim).narrow(dim, size + start - 1, stop - start + 1)
        spans = (Span(start, stop, 1),)  # the first index of the part is padding
        part = TensorPart("weight", (8, 12, 4), "float32", 4, dim, spans)
        of_ranks.append(shard_fingerprints([WeightShard(part, tensor)]))
    assert whole_fingerprints(of_ranks) == {("weight", "float32"): {value_of(whole): {0, 1, 2}}}


def test_copies_that_differ_are_values_of_their_own_with_their_ranks() -> None:
    part = Fingerprint("weight", "float32", 1)
    of_ranks = [[part], [part._replace(value=10, first=4)], [part], [part._replace(value=20, first=4)]]
    assert whole_fingerprints(of_ranks) == {("weight", "float32"): {11: {0, 1}, 21: {2, 3}}}


@pytest.mark.parametrize("shape", [(300_000,), (3, 100_000), (100_000, 3), (50, 20, 300)])
def test_blocks_of_a_large_tensor_add_up_and_do_not_depend_on_its_memory(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    other = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    assert value_of(tensor) == value_of(other) == value_of(tensor.clone()) != value_of(tensor.flip(0))


def test_values_are_converted_to_the_dtype_of_the_receiver_first() -> None:
    master = torch.randn(64, generator=torch.Generator().manual_seed(4))
    assert value_of(master, "bfloat16") == value_of(master.bfloat16()) != value_of(master)


def of_layout(model: ModelConfig, axes: Axes) -> tuple[list[Fingerprint], list[Fingerprint], list[Fingerprint]]:
    """Fingerprints under Megatron's names; under Hugging Face names, from the parts and from the whole tensors."""
    chunks, context = built(model, axes)
    ours = shard_fingerprints(model_shards(chunks, context))
    if model.transformer:  # buffers that a checkpoint of Hugging Face does not have
        return ours, [], []
    parts = shard_fingerprints(hf_shards(chunks, context, model_family(chunks)))
    return ours, parts, tensor_fingerprints(hf_tensors(chunks, context))


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        (MODEL, [{"tp": 2, "pp": 2}, {"tp": 4}, {"tp": 2, "pp": 2, "vpp": 2}]),
        (dataclasses.replace(TIED, dtype="bfloat16"), [{"pp": 4}, {"tp": 2}]),
        (EXPERTS, [{"ep": 4}, {"tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True}]),
        (PLAIN_EXPERTS, [{"ep": 2, "pp": 2}, {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}]),
    ],
    ids=["dense", "tied", "experts-buffers", "experts"],
)
def test_fingerprints_are_those_of_one_process_in_every_layout(model: ModelConfig, layouts: list[Axes]) -> None:
    alone = run_ranks(of_layout, 1, model, {})[0]
    assert alone[1] == alone[2]
    for axes in layouts:
        by_rank = run_ranks(of_layout, 4, model, axes)
        for expected, *parts in zip(alone, *by_rank, strict=True):
            whole = whole_fingerprints(parts)
            assert all(len(values) == 1 for values in whole.values())
            assert {key: set(values) for key, values in whole.items()} == {
                (name, dtype): {value} for name, dtype, value, _ in expected
            }


ONE, OTHER = (Fingerprint(name, "float32", 1) for name in ("one", "other"))


def difference(
    verification: Verification, policy: list[list[Fingerprint]], held: list[list[Fingerprint]]
) -> WeightsNotArrived:
    with pytest.raises(WeightsNotArrived) as caught:
        verification.check(policy, held, 3)
    return caught.value


def test_tensors_that_only_one_side_has_are_reported() -> None:
    verification = Verification("group rollout")
    verification.check([[ONE], [ONE, OTHER]], [[OTHER], [ONE]], 3)
    error = difference(verification, [[ONE]], [[OTHER], [OTHER]])
    assert (error.missing, error.unknown, error.update) == (["one"], ["other"], 3)


def test_a_wrong_copy_is_reported_with_its_rank_and_the_tensor() -> None:
    error = difference(Verification("group rollout"), [[ONE]], [[ONE], [ONE._replace(value=2)]])
    assert error.tensors == {"one": ([1], [1, 2])} and error.ranks == [1] and not error.old
    assert error.update == 3


def test_parts_in_another_layout_add_up_and_old_values_are_named() -> None:
    verification = Verification("the engine")
    halves = [[ONE._replace(value=1)], [ONE._replace(value=4, first=8)]]
    verification.check(halves, [[ONE._replace(value=5)]], 2)
    error = difference(verification, [[ONE._replace(value=7)]], halves)
    assert error.old == ["one"] and error.ranks == [0, 1]


def test_ranks_of_the_policy_that_differ_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Verification("the engine").check([[ONE], [ONE._replace(value=2)]], [[ONE]], 3)
    assert "ranks of the policy hold different values of one" in caplog.text
