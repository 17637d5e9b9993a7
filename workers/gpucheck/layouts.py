"""The layouts of the parity table, what a rank computes in each, and its largest differences to one process.

The parity tests run them on simulated and forked ranks, and ``gpucheck`` on processes over NCCL.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

from mcontroller import DataProto
from workers.actor import ActorRolloutRefWorker
from workers.config import CriticConfig
from workers.critic import CriticWorker
from workers.gpucheck.cases import DECISIVE, EXPERTS, ONE_PROCESS, ROWS, SMALL, STEPS, Case, batch_columns
from workers.gpucheck.policy import actor_config, role_config
from workers.weights.shards import named_shards
from workers.weights.whole_tensors import WholeTensors

_PROMPT, _RESPONSE = 10, 6
QUANTITIES = ("log-probs", "values", "loss", "gradient norm", "weights")
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}

_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_DISTRIBUTED = {"distributed_optimizer": True}
_OVERLAP = _DISTRIBUTED | {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS = {
    "TP2": Case(2, {"tp": 2}),
    "TP4": Case(4, {"tp": 4}),
    "TP2 with SP": Case(2, {"tp": 2, "sequence_parallel": True}),
    "PP2": Case(2, {"pp": 2}),
    "PP4": Case(4, {"pp": 4}),
    "PP2 with VPP2": Case(2, {"pp": 2, "vpp": 2}),
    "CP2": Case(2, {"cp": 2}),
    "CP4 x PP2": Case(8, {"cp": 4, "pp": 2}),
    "DP8": Case(8, {}),
    "TP2 x PP2 x DP2": Case(8, {"tp": 2, "pp": 2}),
    "TP2 x PP2 x CP2": Case(8, {"tp": 2, "pp": 2, "cp": 2}),
    "EP2": Case(2, {"ep": 2}, "experts"),
    "TP2 x PP2 x EP2 with SP": Case(8, {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}, "experts"),
    "EP2, decisive routers": Case(2, {"ep": 2}, DECISIVE),
    "TP2 x PP2 x EP2 with SP, decisive routers": Case(
        8, {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}, DECISIVE
    ),
    "DP2, distributed optimizer": Case(2, {}, optim=_DISTRIBUTED),
    "PP2 x DP2, distributed optimizer with overlap": Case(4, {"pp": 2}, optim=_OVERLAP),
    "TP2, recomputation": Case(2, {"tp": 2}, transformer=_RECOMPUTE),
    "PP2, tied embeddings": Case(2, {"pp": 2}, "tied embeddings"),
    "TP2 x PP2 x DP2, micro-batches by tokens": Case(8, {"tp": 2, "pp": 2}, max_tokens=40),
    "PP2 with VPP2, micro-batches by tokens": Case(2, {"pp": 2, "vpp": 2}, max_tokens=40),
    "one process, packed": ONE_PROCESS["packed"],
    "TP2, packed": Case(2, {"tp": 2}, packed=True),
    "TP2 with SP, packed": Case(2, {"tp": 2, "sequence_parallel": True}, packed=True),
    "PP2, packed": Case(2, {"pp": 2}, packed=True),
    "PP2 with VPP2, packed": Case(2, {"pp": 2, "vpp": 2}, packed=True),
    "CP2, packed": Case(2, {"cp": 2}, packed=True),
    "TP2 x PP2 x CP2 with SP, packed, by tokens": Case(
        8, {"tp": 2, "pp": 2, "cp": 2, "sequence_parallel": True}, packed=True, max_tokens=40
    ),
    "TP2 x PP2 x DP2, packed, by tokens": Case(8, {"tp": 2, "pp": 2}, packed=True, max_tokens=40),
    "PP2 with VPP2, packed, by tokens": Case(2, {"pp": 2, "vpp": 2}, packed=True, max_tokens=40),
    "TP2 x EP2 with SP, packed, by tokens": Case(
        4, {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}, "experts", packed=True, max_tokens=40
    ),
    "CP2, learned positions, packed": Case(2, {"cp": 2}, "learned positions", packed=True),
    "EP2, router losses": Case(2, {"ep": 2}, "router losses"),
    "CP2 x EP2, router losses": Case(2, {"cp": 2, "ep": 2}, "router losses"),
    "TP2 x PP2 x EP2 with SP, router losses": Case(
        8, {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}, "router losses"
    ),
    "TP2 x PP2 x EP4 with SP, router losses": Case(
        8, {"tp": 2, "pp": 2, "ep": 4, "etp": 1, "sequence_parallel": True}, "router losses"
    ),
    "PP2 with VPP2 x EP2, recomputation, router losses": Case(
        4, {"pp": 2, "vpp": 2, "ep": 2}, "router losses", transformer=_RECOMPUTE
    ),
    "EP2, router losses by row, micro-batches by tokens": Case(2, {"ep": 2}, "router losses by row", max_tokens=40),
}


def computed(layout: Case, dtype: str, sizes: Mapping[str, Any] = SMALL) -> dict[str, Any]:
    """Score and train an actor and a critic on this rank of torch.distributed.

    Args:
        layout: with as many ranks as torch.distributed has.
        dtype: of the models.
        sizes: fields of ModelConfig.

    Returns:
        ``dp``, the rank's coordinate; log-probabilities and values before the updates, ``[rows, response]`` of its
        shard, None except on the last stage; ``loss`` and ``gradient norm`` ``[steps, roles]``; all ``weights`` after
        the updates, by name, None except on rank 0; ``routing``, of each router its smallest margin and the number of
        experts that it chose.
    """
    policy, value = workers_of(layout, dtype, sizes)
    if layout.model == DECISIVE:
        _make_routers_decisive(policy)
        _make_routers_decisive(value)
    shard = shard_of(policy, sizes)
    with _recorded_routing([*policy.model, *value.model]) as routing:
        log_probs, values = call(policy, "compute_log_prob", shard), call(value, "compute_values", shard)
        reports = []
        for _ in range(STEPS):
            updated = call(policy, "update_actor", shard), call(value, "update_critic", shard)
            reports.append(updated[0].meta_info["metrics"] | updated[1].meta_info["metrics"])
    state = {
        f"{index}.{name}": tensor
        for index, role in enumerate((policy, value))
        for name, tensor in _whole_weights(role).items()
    }
    return {
        "dp": policy.context.pg.dp.rank(),
        "log-probs": None if log_probs is None else log_probs.batch["old_log_probs"],
        "values": None if values is None else values.batch["values"],
        "loss": torch.tensor(
            [[report[name] for name in sorted(report) if name.endswith("_loss")] for report in reports]
        ),
        "gradient norm": torch.tensor(
            [[report[f"{role}/grad_norm"] for role in ("actor", "critic")] for report in reports]
        ),
        "weights": state if policy.rank == 0 else None,
        "routing": [(min(margins), len(set().union(*experts))) for margins, experts in routing],
    }


def differences(expected: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return, by quantity, the largest absolute difference to one process, over elements, steps and ranks.

    Differences of gradient norms above 1 are divided by the norm.

    Args:
        expected: what one process ``computed``.
        ranks: what every rank of a layout did.
    """
    shards = 1 + max(rank["dp"] for rank in ranks)
    largest = dict.fromkeys(QUANTITIES, 0.0)
    for rank in ranks:
        for quantity in QUANTITIES:
            value, whole = rank[quantity], expected[quantity]
            if value is None:
                continue
            mine = whole.chunk(shards)[rank["dp"]] if quantity in ("log-probs", "values") else whole
            scale = mine.abs().clamp(min=1) if quantity == "gradient norm" else 1.0
            largest[quantity] = max(largest[quantity], _difference(value, mine, scale))
    return largest


def workers_of(layout: Case, dtype: str, sizes: Mapping[str, Any]) -> tuple[ActorRolloutRefWorker, CriticWorker]:
    """Return the actor and the critic of this rank, with models; several ranks may be on one GPU."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local = min(world_size, torch.cuda.device_count()) if torch.cuda.is_available() else world_size
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(local)}
    settings = layout.settings(dtype, sizes)
    # Without clipping: in bfloat16, rounding moves tokens across the edge of a clip.
    rollout = {"prompt_length": _PROMPT, "response_length": _RESPONSE}
    policy = ActorRolloutRefWorker(actor_config(settings | {"rollout": rollout}), "actor")
    value = CriticWorker(role_config(CriticConfig, settings | {"cliprange_value": None}))
    call(policy, "init_model")
    call(value, "init_model")
    return policy, value


def shard_of(worker: Any, sizes: Mapping[str, Any]) -> DataProto:
    """Return the rows of the batch that dispatch assigns to this rank: consecutive ones, by its dp coordinate."""
    batch = DataProto.from_dict(batch_columns(ROWS, _PROMPT, _RESPONSE, sizes["vocab_size"]))
    group = worker.context.pg.dp
    return batch.chunk(group.size())[group.rank()]


def call(worker: Any, method: str, *arguments: Any) -> Any:
    """Call a method of a worker as a group does."""
    with worker.call_context(method):
        return getattr(worker, method)(*arguments)


def _whole_weights(worker: Any) -> dict[str, torch.Tensor]:
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


@contextlib.contextmanager
def _recorded_routing(chunks: list[Any]) -> Iterator[list[tuple[list[float], list[set[int]]]]]:
    """Record, for every router and each of its passes, its smallest margin and the experts that it chose.

    The margin of a token is the gap between the logits of the last expert chosen and of the first one not chosen.
    """
    passes: list[tuple[list[float], list[set[int]]]] = []
    hooks = []
    for module in (module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)):
        margins: list[float] = []
        experts: list[set[int]] = []
        passes.append((margins, experts))

        def record(router: Any, inputs: Any, output: Any, margins: Any = margins, experts: Any = experts) -> None:
            with torch.no_grad():
                best = router.gating(inputs[0]).float().topk(router.topk + 1).values
            margins.append(float((best[..., -2] - best[..., -1]).min()))
            experts.append(set(output[1].nonzero()[:, 1].tolist()))

        hooks.append(module.register_forward_hook(record))
    try:
        yield passes
    finally:
        for hook in hooks:
            hook.remove()


def _difference(some: Any, other: Any, scale: Any = 1.0) -> float:
    if isinstance(some, dict):
        if some.keys() != other.keys():
            return float("inf")
        return max(_difference(some[name], other[name]) for name in some)
    if some.shape != other.shape:
        return float("inf")
    return float(((some.double() - other.double()).abs() / scale).max())
