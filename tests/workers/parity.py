"""What a layout computes beside what one process computes: the layouts, the work, and the largest differences."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.forking import run_ranks
from tests.workers.roles import VOCAB, actor, critic, experience, own_shard, weights

ROWS, STEPS = 16, 3
QUANTITIES = ("log-probs", "values", "loss", "gradient norm", "weights")
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
_MODEL = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 8, "num_query_groups": 4}
_MODELS: dict[str, dict[str, Any]] = {
    "dense": _MODEL,
    "tied embeddings": _MODEL | {"tie_embeddings": True},
    "learned positions": _MODEL | {"position_embedding_type": "learned_absolute"},
    "experts": _MODEL
    | {
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 32,
        "transformer": {"moe_router_load_balancing_type": "none"},
    },
}
_OPTIM = {"lr": 1e-3, "eps": 1e-4, "warmup_steps": 0}
_MODELS["router losses by row"] = _MODELS["experts"] | {
    "transformer": {
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.2,
        "moe_z_loss_coeff": 0.01,
    }
}
_MODELS["router losses"] = _MODELS["experts"] | {
    "transformer": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
        "moe_aux_loss_coeff": [0.1, 0.1],
        "moe_z_loss_coeff": 0.01,
    }
}


@dataclass(frozen=True)
class Layout:
    """One row of the matrix: the axes over ``ranks`` ranks, which model, and what is set beside the axes."""

    ranks: int
    parallel: dict[str, Any]
    model: str = "dense"
    optim: dict[str, Any] = field(default_factory=dict)
    transformer: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 0
    packed: bool = False


_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_DISTRIBUTED = {"distributed_optimizer": True}
_OVERLAP = _DISTRIBUTED | {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS = {
    "TP2": Layout(2, {"tp": 2}),
    "TP4": Layout(4, {"tp": 4}),
    "TP2 with SP": Layout(2, {"tp": 2, "sequence_parallel": True}),
    "PP2": Layout(2, {"pp": 2}),
    "PP4": Layout(4, {"pp": 4}),
    "PP2 with VPP2": Layout(2, {"pp": 2, "vpp": 2}),
    "CP2": Layout(2, {"cp": 2}),
    "CP4 x PP2": Layout(8, {"cp": 4, "pp": 2}),
    "DP8": Layout(8, {}),
    "TP2 x PP2 x DP2": Layout(8, {"tp": 2, "pp": 2}),
    "TP2 x PP2 x CP2": Layout(8, {"tp": 2, "pp": 2, "cp": 2}),
    "EP2": Layout(2, {"ep": 2}, "experts"),
    "TP2 x PP2 x EP2 with SP": Layout(8, {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}, "experts"),
    "DP2, distributed optimizer": Layout(2, {}, optim=_DISTRIBUTED),
    "PP2 x DP2, distributed optimizer with overlap": Layout(4, {"pp": 2}, optim=_OVERLAP),
    "TP2, recomputation": Layout(2, {"tp": 2}, transformer=_RECOMPUTE),
    "PP2, tied embeddings": Layout(2, {"pp": 2}, "tied embeddings"),
    "TP2 x PP2 x DP2, micro-batches by tokens": Layout(8, {"tp": 2, "pp": 2}, max_tokens=40),
    "PP2 with VPP2, micro-batches by tokens": Layout(2, {"pp": 2, "vpp": 2}, max_tokens=40),
    "one process, packed": Layout(1, {}, packed=True),
    "TP2, packed": Layout(2, {"tp": 2}, packed=True),
    "TP2 with SP, packed": Layout(2, {"tp": 2, "sequence_parallel": True}, packed=True),
    "PP2, packed": Layout(2, {"pp": 2}, packed=True),
    "PP2 with VPP2, packed": Layout(2, {"pp": 2, "vpp": 2}, packed=True),
    "CP2, packed": Layout(2, {"cp": 2}, packed=True),
    "TP2 x PP2 x CP2 with SP, packed, by tokens": Layout(
        8, {"tp": 2, "pp": 2, "cp": 2, "sequence_parallel": True}, packed=True, max_tokens=40
    ),
    "TP2 x PP2 x DP2, packed, by tokens": Layout(8, {"tp": 2, "pp": 2}, packed=True, max_tokens=40),
    "PP2 with VPP2, packed, by tokens": Layout(2, {"pp": 2, "vpp": 2}, packed=True, max_tokens=40),
    "TP2 x EP2 with SP, packed, by tokens": Layout(
        4, {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}, "experts", packed=True, max_tokens=40
    ),
    "CP2, learned positions, packed": Layout(2, {"cp": 2}, "learned positions", packed=True),
    "EP2, router losses": Layout(2, {"ep": 2}, "router losses"),
    "CP2 x EP2, router losses": Layout(2, {"cp": 2, "ep": 2}, "router losses"),
    "TP2 x PP2 x EP2 with SP, router losses": Layout(
        8, {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}, "router losses"
    ),
    "TP2 x PP2 x EP4 with SP, router losses": Layout(
        8, {"tp": 2, "pp": 2, "ep": 4, "etp": 1, "sequence_parallel": True}, "router losses"
    ),
    "PP2 with VPP2 x EP2, recomputation, router losses": Layout(
        4, {"pp": 2, "vpp": 2, "ep": 2}, "router losses", transformer=_RECOMPUTE
    ),
    "EP2, router losses by row, micro-batches by tokens": Layout(2, {"ep": 2}, "router losses by row", max_tokens=40),
}
IN_BFLOAT16 = (
    "TP2 with SP",
    "CP2",
    "TP2 x PP2 x DP2",
    "DP2, distributed optimizer",
    "one process, packed",
    "TP2 x PP2 x DP2, packed, by tokens",
    "EP2, router losses",
    "CP2 x EP2, router losses",
    "PP2 with VPP2 x EP2, recomputation, router losses",
)
CASES = [(layout, "float32") for layout in LAYOUTS] + [(layout, "bfloat16") for layout in IN_BFLOAT16]


def assert_parity(name: str, dtype: str) -> None:
    """The layout computes what one process computes, within the tolerance."""
    found = differences(name, dtype)
    assert found.keys() == set(QUANTITIES)
    assert all(math.isfinite(value) and value <= TOLERANCES[dtype] for value in found.values()), found


@functools.cache
def differences(name: str, dtype: str) -> dict[str, float]:
    """By quantity, the largest absolute difference between the layout and one process, over elements and steps.

    Gradient norms above 1 count relative to themselves.
    """
    layout = LAYOUTS[name]
    expected = _in_one_process(layout.model, dtype)
    ranks = run_ranks(_computed, layout.ranks, layout, dtype)
    shards = 1 + max(rank["dp"] for rank in ranks)
    found = dict.fromkeys(QUANTITIES, 0.0)
    for rank in ranks:
        for quantity, value in rank.items():
            if quantity == "dp" or value is None:
                continue
            whole = expected[quantity]
            mine = whole.chunk(shards)[rank["dp"]] if quantity in ("log-probs", "values") else whole
            scale = mine.abs().clamp(min=1) if quantity == "gradient norm" else 1.0
            found[quantity] = max(found[quantity], _difference(value, mine, scale))
    return found


@functools.cache
def _in_one_process(model: str, dtype: str) -> dict[str, Any]:
    return run_ranks(_computed, 1, Layout(1, {}, model), dtype)[0]


def _computed(layout: Layout, dtype: str) -> dict[str, Any]:
    """On one rank: scores of its rows (None off the last stage), then steps; weights on rank 0 only."""
    model = dict(_MODELS[layout.model], dtype=dtype)
    model["transformer"] = dict(model.get("transformer", {}), **layout.transformer)
    same = {
        "model": model,
        "optim": _OPTIM | layout.optim,
        "ppo_mini_batch_size": ROWS,
        "ppo_epochs": 1,
        "ppo_max_tokens_per_micro_batch": layout.max_tokens,
        "packed": layout.packed,
    }
    # Without clipping: in bfloat16 rounding decides on which side of a clip a token at its edge is.
    policy = actor(layout.parallel, "actor", **same, clip_ratio=100.0)
    value = critic(layout.parallel, **same, cliprange_value=None)
    shard = own_shard(experience(ROWS), policy)
    log_probs, values = policy.compute_log_prob(shard), value.compute_values(shard)
    reports = []
    for _ in range(STEPS):
        reports.append(
            policy.update_actor(shard).meta_info["metrics"] | value.update_critic(shard).meta_info["metrics"]
        )
    state = {
        f"{index}.{name}": tensor
        for index, role in enumerate((policy, value))
        for name, tensor in weights(role).items()
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
    }


def _difference(some: Any, other: Any, scale: Any = 1.0) -> float:
    if isinstance(some, dict):
        assert some.keys() == other.keys()
        return max(_difference(some[name], other[name]) for name in some)
    assert some.shape == other.shape
    return float(((some.double() - other.double()).abs() / scale).max())
