"""What a rank computes in a case, on whatever device it has, and how far ranks are from one process.

The parity tests run it on simulated and forked ranks; ``gpucheck`` on a GPU, on the CPU, and over NCCL.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcontroller import DataProto
from workers.actor import ActorRolloutRefWorker
from workers.config import CriticConfig
from workers.critic import CriticWorker
from workers.gpucheck.cases import DECISIVE, EXPERTS, ROWS, SMALL, STEPS, Case, batch_columns, prompt_columns
from workers.gpucheck.policy import TOKENS, actor_config, call, role_config
from workers.weights.shards import named_shards
from workers.weights.whole_tensors import WholeTensors

PROMPT, RESPONSE = 10, 6
QUANTITIES = ("scores", "values", "loss", "gradient norm", "weights")
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest accepted difference between a layout and one process of the same devices."""


def computed(case: Case, dtype: str, sizes: Mapping[str, Any] = SMALL) -> dict[str, Any]:
    """Score and train an actor and a critic on this rank of torch.distributed.

    Args:
        case: with as many ranks as torch.distributed has.
        dtype: of the models.
        sizes: fields of ModelConfig.

    Returns:
        ``backend`` of the ranks; ``dp``, the rank's coordinate; ``scores`` and ``values`` before the updates, and the
        scores ``after`` them, ``[rows, response]`` of its shard, None except on the last stage; ``loss`` and
        ``gradient norm`` ``[steps, roles]``; all ``weights`` after the updates, by name, None except on rank 0.
        Tensors are on the CPU.
    """
    policy, value = workers_of(case, dtype, sizes)
    shard = shard_of(policy, sizes)
    before, values = scores(policy, shard), call(value, "compute_values", shard)
    reports = []
    for _ in range(STEPS):
        updated = call(policy, "update_actor", shard), call(value, "update_critic", shard)
        reports.append(updated[0].meta_info["metrics"] | updated[1].meta_info["metrics"])
    losses = [[report[name] for name in sorted(report) if name.endswith("_loss")] for report in reports]
    norms = [[report[f"{role}/grad_norm"] for role in ("actor", "critic")] for report in reports]
    weights = {
        f"{role}.{name}": tensor
        for role, worker in (("actor", policy), ("critic", value))
        for name, tensor in _whole_weights(worker).items()
    }
    return {
        "backend": dist.get_backend(),
        "dp": policy.context.pg.dp.rank(),
        "scores": before,
        "values": None if values is None else values.batch["values"].cpu(),
        "after": scores(policy, shard),
        "loss": torch.tensor(losses),
        "gradient norm": torch.tensor(norms),
        "weights": weights if policy.rank == 0 else None,
    }


def generated(case: Case, dtype: str, sizes: Mapping[str, Any] = SMALL) -> dict[str, Any]:
    """Generate with an actor on one rank.

    Returns:
        ``greedy`` and ``sampled`` tokens, and ``generation against scoring``: the mean difference between the
        log-probabilities of greedy tokens that generation and scoring return.
    """
    policy, _ = workers_of(case, dtype, sizes)
    columns = prompt_columns(ROWS, PROMPT, sizes["vocab_size"])
    prompts = DataProto.from_dict(columns, meta_info=TOKENS | {"do_sample": False})
    greedy = call(policy, "generate_sequences", prompts)
    drift = drift_of(greedy, call(policy, "compute_log_prob", greedy))
    prompts.meta_info = TOKENS | {"top_p": 0.9, "top_k": 50, "n": 2}
    sampled = call(policy, "generate_sequences", prompts)
    return {
        "greedy": greedy.batch["responses"].cpu(),
        "sampled": sampled.batch["responses"].cpu(),
        "generation against scoring": drift,
    }


def at_checkpoint(case: Case, dtype: str, sizes: Mapping[str, Any], path: str, load: bool) -> dict[str, Any]:
    """Load a checkpoint, or save one after an update.

    Returns:
        ``dp``, the rank's coordinate; ``scores`` then, and after another update, ``[2, rows, response]`` of its shard,
        None except on the last stage.
    """
    policy, _ = workers_of(case, dtype, sizes)
    shard = shard_of(policy, sizes)
    if load:
        call(policy, "load_checkpoint", path)
    else:
        call(policy, "update_actor", shard)
        call(policy, "save_checkpoint", path, 1)
    before = scores(policy, shard)
    call(policy, "update_actor", shard)
    after = scores(policy, shard)
    both = None if before is None or after is None else torch.stack([before, after])
    return {"dp": policy.context.pg.dp.rank(), "scores": both}


def workers_of(case: Case, dtype: str, sizes: Mapping[str, Any]) -> tuple[ActorRolloutRefWorker, CriticWorker]:
    """Return the actor and the critic of this rank, with models; several ranks may be on one GPU."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local = min(world_size, torch.cuda.device_count()) if torch.cuda.is_available() else world_size
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(local)}
    # Without clipping: in bfloat16, rounding moves tokens across the edge of a clip.
    settings, rollout = case.settings(dtype, sizes), {"prompt_length": PROMPT, "response_length": RESPONSE}
    role = "actor_rollout" if case.ranks == 1 else "actor"
    policy = ActorRolloutRefWorker(actor_config(settings | {"rollout": rollout}), role)
    value = CriticWorker(role_config(CriticConfig, settings | {"cliprange_value": None}))
    for worker in (policy, value):
        call(worker, "init_model")
        if case.model == DECISIVE:
            _make_routers_decisive(worker)
    return policy, value


def shard_of(worker: Any, sizes: Mapping[str, Any]) -> DataProto:
    """Return the rows of the batch that dispatch assigns to this rank: consecutive ones, by its dp coordinate."""
    batch = DataProto.from_dict(batch_columns(ROWS, PROMPT, RESPONSE, sizes["vocab_size"]))
    group = worker.context.pg.dp
    return batch.chunk(group.size())[group.rank()]


def scores(worker: Any, batch: DataProto) -> Any:
    """Return log-probabilities, ``[rows, response]`` on the CPU; None except on the last stage."""
    scored = call(worker, "compute_log_prob", batch)
    return None if scored is None else scored.batch["old_log_probs"].cpu()


def drift_of(generated: DataProto, scored: DataProto) -> float:
    """Return the mean difference between the log-probabilities that generation and scoring return."""
    columns = generated.tensors()
    mask = columns["response_mask"]
    difference = scored.tensors()["old_log_probs"] - columns["rollout_log_probs"]
    return float((difference * mask).abs().sum() / mask.sum())


def differences(expected: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return, by quantity, the largest absolute difference to one process, over elements, steps and ranks.

    Differences of gradient norms above 1 are divided by the norm. NaN differs from every number by NaN.

    Args:
        expected: what one process ``computed``.
        ranks: what every rank of a layout did.
    """
    shards = 1 + max(rank["dp"] for rank in ranks)
    by_quantity: dict[str, list[float]] = {quantity: [] for quantity in QUANTITIES}
    for rank in ranks:
        for quantity, values in by_quantity.items():
            if rank[quantity] is not None:
                whole = expected[quantity]
                mine = whole.chunk(shards)[rank["dp"]] if quantity in ("scores", "values") else whole
                values.append(difference(rank[quantity], mine, relative=quantity == "gradient norm"))
    return {quantity: largest(values) for quantity, values in by_quantity.items()}


def difference(some: Any, other: Any, *, relative: bool = False) -> float:
    """Return the largest difference of two tensors, or of two dicts of tensors; infinite if shapes or names differ.

    Args:
        some: the one.
        other: the other.
        relative: divide by what ``other`` has, if it is above 1.
    """
    if isinstance(some, dict):
        if some.keys() != other.keys():
            return float("inf")
        return largest([difference(some[name], other[name]) for name in some])
    if some.shape != other.shape:
        return float("inf")
    scale = other.double().abs().clamp(min=1) if relative else 1.0
    return float(((some.double() - other.double()).abs() / scale).max())


def largest(values: Iterable[float]) -> float:
    """Return the largest of the values; NaN if one is NaN, or if there is none."""
    tensor = torch.tensor(list(values), dtype=torch.float64)
    return float(tensor.max()) if len(tensor) else float("nan")


def _whole_weights(worker: Any) -> dict[str, Tensor]:
    """Return every weight of the whole model, on the CPU (a collective)."""
    with worker.context.activate():
        whole = WholeTensors(lambda: list(named_shards(worker.model, worker.context)))
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in whole}


@torch.no_grad()
def _make_routers_decisive(worker: Any) -> None:
    """Route every token by its id to two experts with a large margin, by another table in every layer.

    One element of the embedding for each expert is 1 or -1, ten times the standard deviation of the others and of the
    layers' weights, and the logit of an expert depends mostly on one of them.
    """
    for shard in named_shards(worker.model, worker.context):
        layer = re.fullmatch(r"decoder\.layers\.(\d+)\.mlp\.router\.weight", shard.name)
        if shard.name != "embedding.word_embeddings.weight" and layer is None:
            continue
        whole = 0.1 * torch.randn(shard.full_shape, generator=torch.Generator().manual_seed(7))
        if layer is not None:
            whole[:, :EXPERTS] = torch.eye(EXPERTS).roll(int(layer[1]), 0)
        else:
            pairs = itertools.cycle(itertools.combinations(range(EXPERTS), 2))
            for token, pair in zip(whole, pairs, strict=False):
                token[:EXPERTS] = -1.0
                token[list(pair)] = 1.0
        shard.param.copy_(shard.slice_of(whole))
    worker.state.optimizer.reload_model_params()
