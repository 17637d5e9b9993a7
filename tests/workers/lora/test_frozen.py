"""``freeze`` and ``train_only``: what is not trained keeps its bits, and has neither gradients nor optimizer state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.workers.lora.test_training import EXPERTS, LORA
from tests.workers.roles import MODEL, actor, experience, largest_difference, own_shard, weights
from workers import ModelConfig, ParallelConfig
from workers.config import load_config
from workers.memory.parameters import Parameters, count_parameters
from workers.weights.offload import gradient_tensors, optimizer_tensors

pytestmark = pytest.mark.simulated

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "a router and the embedding": (
        EXPERTS | {"freeze": ["mlp.router.weight", "embed_tokens.weight"]},
        {"ep": 2},
        {"router", "embedding"},
    ),
    "first layers": (
        {"freeze": ["decoder.layers.0.*", "layers.1.*", "embedding.*"]},
        {"pp": 2},
        {"layers.0", "layers.1", "embedding"},
    ),
    "all but the norms": (
        {"train_only": ["*norm*weight"]},
        {"tp": 2, "sequence_parallel": True},
        {"linear_proj", "output", "embedding"},
    ),
    "adapters and a router": (
        EXPERTS | {"lora": LORA, "train_only": ["router.weight"]},
        {"ep": 2},
        {"embedding", "layer_norm"},
    ),
}


def trained(parallel: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    worker = actor(parallel, "actor", model=MODEL | model)
    before = weights(worker)
    worker.update_actor(own_shard(experience(8), worker))
    counted = {True: 0, False: 0}
    for chunk in worker.model:
        for parameter in chunk.parameters():
            counted[getattr(parameter, "allreduce", True)] += parameter.numel() if parameter.requires_grad else 0
    state = worker.state.optimizer
    return {
        "pp": worker.context.pg.pp.rank(),
        "before": before,
        "after": weights(worker),
        "trained": Parameters(counted[True], counted[False]),
        "gradients": sum(tensor.numel() for tensor in gradient_tensors(worker.model)),
        "state": sum(tensor.numel() for tensor in optimizer_tensors(state)),
    }


@pytest.mark.parametrize("case", CASES)
def test_frozen_weights_stay_and_cost_nothing(case: str) -> None:
    model, parallel, kept = CASES[case]
    expected, ranks = run_ranks(trained, 1, {}, model)[0], run_ranks(trained, 2, parallel, model)
    before, after = expected["before"], expected["after"]
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and changed != set(before)
    assert not [name for name in changed if any(part in name for part in kept)]
    assert largest_difference(after, ranks[0]["after"]) < 1e-5
    config = load_config(ModelConfig, MODEL | model)
    for rank in ranks:
        estimated = count_parameters(config, ParallelConfig(**parallel), rank["pp"], trained=True)
        if "ep" not in parallel:
            estimated = Parameters(estimated.dense + estimated.expert)
        assert estimated == rank["trained"]
        total = estimated.dense + estimated.expert
        assert rank["gradients"] == total
        assert rank["state"] <= 3 * total + 200  # the weights, two moments, and the numbers of steps
