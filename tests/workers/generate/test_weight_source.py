"""The weights in the shape of vLLM's WeightSource."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.workers.roles import actor
from workers.generate.rollout_protocol import PolicyWeights
from workers.generate.weight_source import PolicyWeightSource

pytestmark = pytest.mark.simulated


def listed(parallel: dict[str, int]) -> tuple[Any, list[str], dict[str, torch.Tensor]]:
    worker = actor(parallel, "actor")
    with worker.call_context("rollout_weights"):
        source = PolicyWeightSource(PolicyWeights(worker.model, worker.context), torch.bfloat16)
        return source.metadata(), source.held_names(), {name: tensor.clone() for name, tensor in source}


def test_metadata_names_and_tensors_agree_and_equal_those_of_one_process() -> None:
    ((described, _, whole),) = run_ranks(listed, 1, {})
    assert {dtype for _, _, dtype in described} == {torch.bfloat16}
    for metadata, names, tensors in run_ranks(listed, 4, {"tp": 2, "pp": 2}):
        assert sorted(metadata) == sorted(described)
        assert names == [name for name, _, _ in metadata] == list(tensors)
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
            name: shape for name, shape, _ in metadata
        }
        assert tensors.keys() == whole.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, whole[name]), name
