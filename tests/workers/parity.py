"""Compare every layout with one process: the layouts, the computation, and the largest differences."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from tests.ranks import run_ranks
from tests.workers.roles import actor, critic, experience, own_shard, weights
from workers.gpucheck.cases import DECISIVE, EXPERTS, ONE_PROCESS, ROWS, STEPS, Case
from workers.weights.shards import named_shards

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
OF_MANY_RANKS = {
    "TP4 x PP4 x DP4 x CP2": Case(128, {"tp": 4, "pp": 4, "cp": 2}),
    "TP4 x PP4 x DP8 x CP4": Case(512, {"tp": 4, "pp": 4, "cp": 4}),
}
"""Layouts for simulated ranks only: one needs minutes of CPU."""
IN_BFLOAT16 = (
    "TP2",
    "TP4",
    "TP2 with SP",
    "PP2",
    "PP4",
    "PP2 with VPP2",
    "CP2",
    "CP4 x PP2",
    "DP8",
    "TP2 x PP2 x DP2",
    "TP2 x PP2 x CP2",
    "EP2, decisive routers",
    "TP2 x PP2 x EP2 with SP, decisive routers",
    "DP2, distributed optimizer",
    "PP2 x DP2, distributed optimizer with overlap",
    "TP2, recomputation",
    "PP2, tied embeddings",
    "one process, packed",
    "TP2 x PP2 x DP2, packed, by tokens",
    "EP2, router losses",
    "CP2 x EP2, router losses",
    "PP2 with VPP2 x EP2, recomputation, router losses",
)
CASES = [(layout, "float32") for layout in LAYOUTS] + [(layout, "bfloat16") for layout in IN_BFLOAT16]
COVERED = {
    **{
        layout: f"test_verified_roles.py: {case}"
        for case, layouts in {
            "dense": (
                "TP2",
                "TP4",
                "TP2 with SP",
                "PP2",
                "PP4",
                "PP2 with VPP2",
                "CP2",
                "CP4 x PP2",
                "DP8",
                "TP2 x PP2 x DP2",
                "DP2, distributed optimizer",
            ),
            "experts": (
                "EP2",
                "EP2, decisive routers",
            ),
            "overlap": ("PP2 x DP2, distributed optimizer with overlap",),
            "recomputation": ("TP2, recomputation",),
            "tied embeddings": ("PP2, tied embeddings",),
            "by tokens": (
                "TP2 x PP2 x DP2, micro-batches by tokens",
                "PP2 with VPP2, micro-batches by tokens",
            ),
            "packed": ("TP2 with SP, packed",),
            "router losses": (
                "EP2, router losses",
                "CP2 x EP2, router losses",
            ),
        }.items()
        for layout in layouts
    },
    "TP2 x PP2 x CP2": "TP2 x PP2 x CP2 with SP, packed, by tokens",
    "TP2 x PP2 x EP2 with SP": "TP2 x PP2 x EP4 with SP, router losses",
    "TP2 x PP2 x EP2 with SP, decisive routers": "TP2 x PP2 x EP4 with SP, router losses; decisive for bfloat16",
    "TP2, packed": "TP2 x PP2 x DP2, packed, by tokens",
    "PP2, packed": "TP2 x PP2 x DP2, packed, by tokens",
    "PP2 with VPP2, packed": "PP2 with VPP2, packed, by tokens",
    "CP2, packed": "CP2, learned positions, packed",
    "TP2 x PP2 x EP2 with SP, router losses": "TP2 x PP2 x EP4 with SP, router losses",
}
"""Layouts of the page -> what has all their paths in float32; these are compared by ``make test-slow`` alone."""
EVERY_AXIS_IN_BFLOAT16 = (
    "TP2 with SP",
    "CP2",
    "EP2, decisive routers",
    "TP2 x PP2 x EP2 with SP, decisive routers",
    "PP2 x DP2, distributed optimizer with overlap",
    "TP2, recomputation",
    "PP2, tied embeddings",
    "one process, packed",
    "PP2 with VPP2 x EP2, recomputation, router losses",
)
"""A dtype takes no separate path in a layout: each axis and each kind of model once."""
SLOW = [
    case
    for case in CASES
    if case[0] not in (EVERY_AXIS_IN_BFLOAT16 if case[1] == "bfloat16" else LAYOUTS.keys() - COVERED)
]


def assert_parity(name: str, dtype: str) -> None:
    """Assert that the layout computes what one process computes, within the tolerance."""
    found = differences(name, dtype, run_ranks)
    assert found.keys() == set(QUANTITIES)
    assert all(math.isfinite(value) and value <= TOLERANCES[dtype] for value in found.values()), found


def assert_decisive(name: str, dtype: str) -> None:
    """Assert that each router of every rank, and of one process, uses all experts, and that no choice is close."""
    processes = _in_one_process(LAYOUTS[name].model, dtype, run_ranks), *of_every_rank(name, dtype, run_ranks)
    for process in processes:
        assert process["routing"]
        for margin, experts in process["routing"]:
            assert experts == EXPERTS
            assert margin > 2.0  # bfloat16 rounds these logits, which are below 4, by 1/128 at most


def _layout(name: str) -> Case:
    return LAYOUTS.get(name) or OF_MANY_RANKS[name]


@functools.cache
def differences(name: str, dtype: str, run: Callable[..., Any]) -> dict[str, float]:
    """Return, by quantity, the largest absolute difference to one process, over elements, steps and ranks.

    Differences of gradient norms above 1 are divided by the norm. ``run`` is ``run_ranks`` of simulated or forked
    ranks.
    """
    layout = _layout(name)
    expected, ranks = _in_one_process(layout.model, dtype, run), of_every_rank(name, dtype, run)
    shards = 1 + max(rank["dp"] for rank in ranks)
    found = dict.fromkeys(QUANTITIES, 0.0)
    for rank in ranks:
        for quantity in QUANTITIES:
            value, whole = rank[quantity], expected[quantity]
            if value is None:
                continue
            mine = whole.chunk(shards)[rank["dp"]] if quantity in ("log-probs", "values") else whole
            scale = mine.abs().clamp(min=1) if quantity == "gradient norm" else 1.0
            found[quantity] = max(found[quantity], _difference(value, mine, scale))
    return found


@functools.cache
def of_every_rank(name: str, dtype: str, run: Callable[..., Any]) -> list[dict[str, Any]]:
    return run(computed, _layout(name).ranks, _layout(name), dtype)


@functools.cache
def _in_one_process(model: str, dtype: str, run: Callable[..., Any]) -> dict[str, Any]:
    return run(computed, 1, Case(1, {}, model), dtype)[0]


def computed(layout: Case, dtype: str) -> dict[str, Any]:
    """Score and train on this rank: scores are None except on the last stage, weights except on rank 0."""
    settings = layout.settings(dtype)
    # Without clipping: in bfloat16, rounding moves tokens across the edge of a clip.
    policy = actor(settings.pop("parallel"), "actor", **settings, clip_ratio=100.0)
    value = critic(dict(layout.parallel), **settings, cliprange_value=None)
    if layout.model == DECISIVE:
        _make_routers_decisive(policy)
        _make_routers_decisive(value)
    shard = own_shard(experience(ROWS), policy)
    with _recorded_routing([*policy.model, *value.model]) as routing:
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
        "routing": [(min(margins), len(set().union(*experts))) for margins, experts in routing],
    }


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
    found: list[tuple[list[float], list[set[int]]]] = []
    hooks = []
    for module in (module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)):
        margins, experts = [], []
        found.append((margins, experts))

        def record(router: Any, inputs: Any, output: Any, margins: Any = margins, experts: Any = experts) -> None:
            with torch.no_grad():
                best = router.gating(inputs[0]).float().topk(router.topk + 1).values
            margins.append(float((best[..., -2] - best[..., -1]).min()))
            experts.append(set(output[1].nonzero()[:, 1].tolist()))

        hooks.append(module.register_forward_hook(record))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _difference(some: Any, other: Any, scale: Any = 1.0) -> float:
    if isinstance(some, dict):
        assert some.keys() == other.keys()
        return max(_difference(some[name], other[name]) for name in some)
    assert some.shape == other.shape
    return float(((some.double() - other.double()).abs() / scale).max())
