"""Training with weight gradients fused into their sum equals training with separate gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import unwrap_model

from tests.ranks import run_ranks
from tests.workers.roles import MODEL, actor, experience, largest_difference, own_shard, weights
from workers.actor import ActorRolloutRefWorker
from workers.train.batches import TokenBatch

pytestmark = pytest.mark.simulated

MODELS = {
    "untied": {"add_qkv_bias": True},
    "tied": {"tie_embeddings": True},
    "bfloat16": {"dtype": "bfloat16"},
    "recompute": {"transformer": {"recompute_granularity": "full", "recompute_method": "uniform"}},
    "experts": {"num_moe_experts": 4, "moe_ffn_hidden_size": 32},
}
LAYOUTS = {
    "one process": (1, {}),
    "tp2-sp": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2}),
}


def trained(parallel: dict[str, Any], model: dict[str, Any], fused: bool) -> tuple[dict[str, torch.Tensor], bool]:
    """Return the weights after two epochs of micro-batches, and whether any linear added its gradient to the sum."""
    extra = dict(model.get("transformer", {}), recompute_num_layers=1 if "transformer" in model else None)
    extra["gradient_accumulation_fusion"] = fused
    worker = actor(parallel, "actor", model=MODEL | model | {"transformer": extra})
    linears = [
        module
        for chunk in worker.model
        for module in chunk.modules()
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and module.weight is not None
    ]
    worker.update_actor(own_shard(experience(8), worker))
    assert linears
    return weights(worker), any(getattr(linear.weight, "grad_added_to_main_grad", False) for linear in linears)


@pytest.mark.parametrize(
    ("layout", "model"),
    [*(("one process", model) for model in MODELS), ("tp2-sp", "experts"), ("pp2-vpp2", "tied")],
)
def test_fused_gradients_train_to_the_same_weights(layout: str, model: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    expected, added_without_fusion = run_ranks(trained, world_size, parallel, MODELS[model], False)[-1]
    actual, added = run_ranks(trained, world_size, parallel, MODELS[model], True)[-1]
    assert added and not added_without_fusion
    assert largest_difference(actual, expected) < (1e-2 if model == "bfloat16" else 2e-6)


class PulledToZero(ActorRolloutRefWorker):
    """A policy whose loss depends on the weight of a linear directly, in addition to the output of that linear."""

    def loss(
        self, rows: TokenBatch, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total, count, report = super().loss(rows, output)
        layer = unwrap_model(self.model[-1]).decoder.layers[-1]
        return total + 0.05 * count * layer.mlp.linear_fc2.weight.square().sum(), count, report


def trained_with_several_gradients(optim: dict[str, bool], fused: bool) -> dict[str, torch.Tensor]:
    """Logits are computed in chunks, so that the weight of the output layer has several gradients too."""
    model = MODEL | {"transformer": {"gradient_accumulation_fusion": fused}}
    worker = actor({}, "actor", PulledToZero, model=model, optim=optim, log_prob_chunk_tokens=5)
    worker.update_actor(own_shard(experience(8), worker))
    return weights(worker)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_fusion_keeps_all_other_gradients_of_a_weight(overlap: bool) -> None:
    optim = {"distributed_optimizer": overlap, "overlap_grad_reduce": overlap}
    expected, actual = (run_ranks(trained_with_several_gradients, 2, optim, fused)[0] for fused in (False, True))
    assert largest_difference(actual, expected) < 2e-6


def fused_by_default() -> bool:
    return bool(actor({}, "actor").model[0].config.gradient_accumulation_fusion)


def test_fusion_is_the_default_on_a_cpu() -> None:
    assert run_ranks(fused_by_default, 1) == [True]
