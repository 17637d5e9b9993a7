"""Tiny roles on real ranks, and batches for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.registration import registrations
from tests.workers.full_state import full_state_dict
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, CriticConfig, load_config
from workers.critic import CriticWorker
from workers.parity.cases import batch_columns, prompt_columns

PROMPT, RESPONSE = 10, 6
EOS, PAD, VOCAB = 1, 0, 61  # a vocabulary that tp does not divide
MODEL = {
    "vocab_size": VOCAB,
    "max_sequence_length": 32,
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 64,
    "init_method_std": 0.1,
}
# A larger eps than usual: otherwise Adam turns rounding noise on near-zero gradients into steps of full size.
OPTIM = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.01, "warmup_steps": 2}
FOR_GRADIENTS = {"lr": 0.0, "clip_grad": 0.0, "distributed_optimizer": False}
"""Changes no weight, and leaves each rank the whole gradients, which a distributed optimizer does not."""
SAMPLED = {"eos_token_id": EOS, "pad_token_id": PAD}
GREEDY = SAMPLED | {"do_sample": False}


def actor(
    parallel: dict[str, Any],
    role: str = "actor_rollout_ref",
    worker_class: type[ActorRolloutRefWorker] = ActorRolloutRefWorker,
    **changes: Any,
) -> Any:
    """An initialized actor on this rank of a ``run_ranks`` world."""
    defaults = {
        "model": MODEL,
        "parallel": parallel,
        "optim": OPTIM,
        "rollout": {"prompt_length": PROMPT, "response_length": RESPONSE, "seed": 3},
        "ppo_mini_batch_size": 8,
        "ppo_micro_batch_size": 2,
        "ppo_epochs": 2,
    }
    be_a_worker()
    worker = callable_directly(worker_class(_config(ActorConfig, defaults, changes), role))
    worker.init_model()
    return worker


def critic(parallel: dict[str, Any], worker_class: type[CriticWorker] = CriticWorker, **changes: Any) -> CriticWorker:
    """An initialized critic on this rank."""
    defaults = {
        "model": MODEL,
        "parallel": parallel,
        "optim": OPTIM,
        "ppo_mini_batch_size": 8,
        "ppo_micro_batch_size": 2,
        "ppo_epochs": 2,
    }
    be_a_worker()
    worker = callable_directly(worker_class(_config(CriticConfig, defaults, changes)))
    worker.init_model()
    return worker


_configs: dict[Any, Any] = {}


def _config(cls: type, *sources: dict[str, Any]) -> Any:
    """What load_config returns, once for all ranks: reading one takes a tenth of a small test."""
    key = cls, repr(sources)
    if key not in _configs:
        _configs[key] = load_config(cls, *sources)
    return _configs[key]


def callable_directly(worker: Any) -> Any:
    """The worker, with registered methods that run inside its call context, as in the process of a group's rank."""

    def entering(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with worker.call_context(name):
                return method(*args, **kwargs)

        return run

    for name in registrations(type(worker)):
        setattr(worker, name, entering(name, getattr(worker, name)))
    return worker


def be_a_worker() -> None:
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}


def prompts(rows: int, meta_info: dict[str, Any]) -> DataProto:
    """Random prompts of different lengths, padded on the left."""
    return DataProto.from_dict(prompt_columns(rows, PROMPT, VOCAB), meta_info=meta_info)


def experience(rows: int) -> DataProto:
    """A batch as the trainer hands it to an update: responses of different lengths, and columns for the losses."""
    return DataProto.from_dict(batch_columns(rows, PROMPT, RESPONSE, VOCAB))


def own_shard(batch: DataProto, worker: Any) -> DataProto:
    """The rows that dispatch assigns to this rank: consecutive ones, by its coordinate on the dp axis."""
    group = worker.context.pg.dp
    return batch.chunk(group.size())[group.rank()]


def weights(worker: Any) -> dict[str, torch.Tensor]:
    """Every weight of the whole model."""
    with worker.context.activate():
        return full_state_dict(worker.model, worker.context)


def accumulated_gradients(worker: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of the last mini-batch by the names of the weights, which they replace."""
    with torch.no_grad():
        for chunk in worker.model:
            for parameter in chunk.parameters():
                parameter.copy_(parameter.main_grad)
    return weights(worker)


def largest_difference(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """Over all tensors of two models or batches with the same names."""
    assert some.keys() == others.keys()
    return max(float((some[name] - others[name]).abs().max()) for name in some)
