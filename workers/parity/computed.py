"""What a rank computes in a case, on whatever device it has, and how far ranks are from one process.

The parity tests run it on simulated and forked ranks; ``gpucheck`` on a GPU, on the CPU, and over NCCL.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcontroller import DataProto
from workers.actor import ActorRolloutRefWorker
from workers.config import CriticConfig
from workers.critic import CriticWorker
from workers.parity.cases import DECISIVE, EXPERTS, ROWS, SMALL, STEPS, Case, batch_columns, prompt_columns
from workers.parity.roles import TOKENS, actor_config, call, role_config
from workers.weights.shards import named_shards
from workers.weights.whole_tensors import WholeTensors

PROMPT, RESPONSE = 10, 6
QUANTITIES = ("scores", "values", "loss", "gradient norm", "weights")
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest accepted difference between a layout and one process of the same devices, with the sizes of ``SMALL``."""


def computed(case: Case, dtype: str, sizes: Mapping[str, Any] = SMALL, generates: bool = False) -> dict[str, Any]:
    """Score and train an actor and a critic on this rank of torch.distributed.

    Args:
        case: with as many ranks as torch.distributed has.
        dtype: of the models.
        sizes: fields of ModelConfig.
        generates: whether to generate before the updates, on one rank: see ``_generated``.

    Returns:
        ``backend`` of the ranks; ``dp``, the rank's coordinate; ``scores`` and ``values`` before the updates, and the
        scores ``after`` them, ``[rows, response]`` of its shard, None except on the last stage; ``loss`` and
        ``gradient norm`` ``[steps, roles]``; all ``weights`` after the updates, by name, None except on rank 0.
        Tensors are on the CPU.
    """
    policy, value = workers_of(case, dtype, sizes)
    shard = shard_of(policy, sizes)
    tokens = _generated(policy, sizes) if generates else {}
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
        **tokens,
    }


def _generated(policy: ActorRolloutRefWorker, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``greedy`` and ``sampled`` tokens, and ``generation``.

    That is the mean difference between the log-probabilities of greedy tokens that generation and scoring return.
    """
    columns = prompt_columns(ROWS, PROMPT, sizes["vocab_size"])
    prompts = DataProto.from_dict(columns, meta_info=TOKENS | {"do_sample": False})
    greedy = call(policy, "generate_sequences", prompts)
    drift = drift_of(greedy, call(policy, "compute_log_prob", greedy))
    prompts.meta_info = TOKENS | {"top_p": 0.9, "top_k": 50, "n": 2}
    sampled = call(policy, "generate_sequences", prompts)
    responses = {"greedy": greedy.batch["responses"].cpu(), "sampled": sampled.batch["responses"].cpu()}
    return responses | {"generation": drift}


def at_checkpoint(case: Case, dtype: str, sizes: Mapping[str, Any], path: str, load: bool) -> dict[str, Any]:
    """Load a checkpoint, or save one after an update.

    Returns:
        ``dp``, the rank's coordinate; ``scores`` then, and ``after`` another update, ``[rows, response]`` of its shard,
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
    return {"dp": policy.context.pg.dp.rank(), "scores": before, "after": scores(policy, shard)}


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


def differences(
    expected: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]], figures: Iterable[str] = QUANTITIES
) -> dict[str, float]:
    """Return how far ranks are from expected ones: keys of ``COMPARED``, the largest over elements, steps and ranks.

    NaN differs from every number by NaN; tensors of other shapes or names differ by infinity.

    Args:
        expected: what every rank of one layout computed, usually one process.
        ranks: what every rank of another one did.
        figures: the keys.
    """
    shards = 1 + max(rank["dp"] for rank in ranks)
    largest_by_figure = {}
    for figure in figures:
        quantity, compare = COMPARED[figure]
        by_shard = {rank["dp"]: rank[quantity] for rank in expected if rank[quantity] is not None}
        values = []
        for rank in ranks:
            if rank[quantity] is not None:
                whole = by_shard[0]
                if quantity in _OF_ROWS:
                    whole = torch.cat([by_shard[shard] for shard in sorted(by_shard)]).chunk(shards)[rank["dp"]]
                values.append(compare(rank[quantity], whole))
        largest_by_figure[figure] = largest(values)
    return largest_by_figure


def largest(values: Iterable[float]) -> float:
    """Return the largest of the values; NaN if one is NaN, or if there is none."""
    tensor = torch.tensor(list(values), dtype=torch.float64)
    return float(tensor.max()) if len(tensor) else float("nan")


def difference(some: Any, other: Any) -> float:
    """Return the largest absolute difference of two tensors, or of two dicts of tensors."""
    if isinstance(some, dict):
        if some.keys() != other.keys():
            return math.inf
        return largest([difference(some[name], other[name]) for name in some])
    return math.inf if some.shape != other.shape else float((some.double() - other.double()).abs().max())


def _relative_difference(some: Tensor, other: Tensor) -> float:
    """Return the largest difference, divided by values of ``other`` that are above 1."""
    scale = other.double().abs().clamp(min=1)
    return difference(some / scale, other / scale)


def mean_difference(some: Tensor, other: Tensor) -> float:
    """Return the mean difference of elements that are not 0, which is padding.

    In little precision, a token that is nearly as close to another expert may go there: single ones differ by more.
    """
    if some.shape != other.shape:
        return math.inf
    return float((some.double() - other.double()).abs().sum() / (other != 0).sum().clamp(min=1))


def _rows_that_differ(some: Tensor, other: Tensor) -> float:
    return len(other) if some.shape != other.shape else int((some != other).any(1).sum())


_OF_ROWS = ("scores", "values", "after")
COMPARED: dict[str, tuple[str, Callable[[Any, Any], float]]] = {
    "scores": ("scores", difference),
    "values": ("values", difference),
    "loss": ("loss", _relative_difference),
    "gradient norm": ("gradient norm", _relative_difference),
    "weights": ("weights", difference),
    "after": ("after", difference),
    "mean of scores": ("scores", mean_difference),
    "mean after": ("after", mean_difference),
    "greedy": ("greedy", _rows_that_differ),
    "sampled": ("sampled", _rows_that_differ),
    "generation": ("generation", lambda some, _: some),  # beside the scores of the same device
}
"""Figure -> the quantity that ranks computed, and how far two of them are from each other."""


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
        layer = re.fullmatch(r"decoder\.layers\.(\d+)\.mlp\.router\.weight", shard.part.name)
        if shard.part.name != "embedding.word_embeddings.weight" and layer is None:
            continue
        whole = 0.1 * torch.randn(shard.part.shape, generator=torch.Generator().manual_seed(7))
        if layer is not None:
            whole[:, :EXPERTS] = torch.eye(EXPERTS).roll(int(layer[1]), 0)
        else:
            pairs = itertools.cycle(itertools.combinations(range(EXPERTS), 2))
            for token, pair in zip(whole, pairs, strict=False):
                token[:EXPERTS] = -1.0
                token[list(pair)] = 1.0
        shard.param.copy_(shard.slice_of(whole))
    worker.state.optimizer.reload_model_params()
