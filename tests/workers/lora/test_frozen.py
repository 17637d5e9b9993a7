"""``freeze`` and ``train_only``: what is not trained keeps its bits, and has neither gradients nor optimizer state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.workers.lora.test_training import EXPERTS, LORA
from tests.workers.roles import MODEL, actor, experience, largest_difference, own_shard, weights
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
    parameters = [parameter for chunk in worker.model for parameter in chunk.parameters()]
    state = worker.state.optimizer
    return {
        "before": before,
        "after": weights(worker),
        "trained": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
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
    for rank in ranks:
        assert rank["gradients"] == rank["trained"]
        assert rank["state"] <= 3 * rank["trained"] + 200  # the weights, two moments, and the numbers of steps
