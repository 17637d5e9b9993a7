"""Small policies with experts, and batches with the experts that are to be replayed."""

from __future__ import annotations

from typing import Any

import torch

from mcontroller.data.batch import DataProto
from tests.workers.roles import MODEL, actor, experience
from workers.actor import ActorRolloutRefWorker

ROWS, EXPERTS, TOPK, LAYERS = 16, 8, 2, 4
NO_BALANCE = {"moe_router_load_balancing_type": "none"}
MIXTURE: dict[str, Any] = MODEL | {
    "num_moe_experts": EXPERTS,
    "moe_router_topk": TOPK,
    "moe_ffn_hidden_size": 32,
    "num_query_groups": 4,
    "transformer": NO_BALANCE,
}


def policy(
    parallel: dict[str, Any],
    mode: str,
    role: str = "actor",
    worker_class: type[ActorRolloutRefWorker] = ActorRolloutRefWorker,
    **changes: Any,
) -> Any:
    """Return an actor with experts; ``transformer`` are other fields of Megatron's TransformerConfig."""
    transformer = NO_BALANCE | changes.pop("transformer", {})
    model = MIXTURE | {"transformer": transformer} | changes.pop("model", {})
    return actor(parallel, role, worker_class, model=model, router_replay=mode, **changes)


def random_experts(batch: DataProto, layers: int = LAYERS, experts: int = EXPERTS, topk: int = TOPK) -> torch.Tensor:
    """Return experts that no router has chosen for the tokens of a batch, int8 ``[rows, tokens, layers, topk]``.

    Padding has none, and neither have some tokens.
    """
    shape = (*batch.batch["input_ids"].shape, layers, experts)
    generator = torch.Generator().manual_seed(9)
    chosen = torch.rand(shape, generator=generator).argsort(-1)[..., :topk].to(torch.int8)
    without = (batch.batch["attention_mask"] == 0) | (torch.rand(shape[:2], generator=generator) < 0.1)
    return chosen.masked_fill(without[:, :, None, None], -1)


def batch_with_experts(layers: int = LAYERS) -> DataProto:
    """Return a batch for an update, with random experts."""
    batch = experience(ROWS)
    return batch.with_tensors({"routed_experts": random_experts(batch, layers)})
