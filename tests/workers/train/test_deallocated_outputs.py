"""Outputs of pipeline stages that are freed while they are sent, as Megatron-LM always does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.forking import run_ranks
from tests.workers.roles import MODEL, actor, experience, largest_difference, own_shard, weights

pytestmark = pytest.mark.processes


def trained(transformer: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    model = MODEL | {"hidden_size": 64, "transformer": transformer}
    worker = actor({"pp": 2, "vpp": 2}, "actor", model=model)
    metrics = worker.update_actor(own_shard(experience(16), worker)).meta_info["metrics"]
    return metrics["actor/grad_norm"], weights(worker)


def test_updates_are_those_without_deallocation() -> None:
    norm, kept = run_ranks(trained, 2, {"deallocate_pipeline_outputs": False})[1]
    for _ in range(2):
        norm_of_freed, freed = run_ranks(trained, 2, {})[1]
        assert norm_of_freed == norm
        assert largest_difference(freed, kept) == 0
