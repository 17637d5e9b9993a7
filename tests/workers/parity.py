"""Compare every layout with one process, on simulated or forked ranks; which layouts run in which tier of the tests."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from tests.ranks import run_ranks
from workers.parity import cases
from workers.parity import computed as ranks
from workers.parity.cases import DECISIVE, EXPERTS, ONE_PROCESS, SMALL, STEPS, Case
from workers.parity.computed import QUANTITIES, TOLERANCES, computed, scores, shard_of, workers_of
from workers.parity.roles import call

__all__ = ["LAYOUTS", "QUANTITIES", "TOLERANCES", "computed", "differences"]

_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS = cases.LAYOUTS | {
    "TP4": Case(4, {"tp": 4}),
    "TP2 with SP": Case(2, {"tp": 2, "sequence_parallel": True}),
    "PP4": Case(4, {"pp": 4}),
    "PP2 with VPP2": Case(2, {"pp": 2, "vpp": 2}),
    "CP4 x PP2": Case(8, {"cp": 4, "pp": 2}),
    "DP8": Case(8, {}),
    "TP2 x PP2 x CP2": Case(8, {"tp": 2, "pp": 2, "cp": 2}),
    "TP2 x PP2 x EP2 with SP": Case(8, {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}, "experts"),
    "TP2 x PP2 x EP2 with SP, decisive routers": Case(
        8, {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}, DECISIVE
    ),
    "TP2, recomputation": Case(2, {"tp": 2}, transformer=_RECOMPUTE),
    "PP2, tied embeddings": Case(2, {"pp": 2}, "tied embeddings"),
    "TP2 x PP2 x DP2, micro-batches by tokens": Case(8, {"tp": 2, "pp": 2}, max_tokens=40),
    "PP2 with VPP2, micro-batches by tokens": Case(2, {"pp": 2, "vpp": 2}, max_tokens=40),
    "one process, packed": ONE_PROCESS["packed"],
    "TP2, packed": Case(2, {"tp": 2}, packed=True),
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
    "TP2, packed": "TP2 x PP2 x CP2 with SP, packed, by tokens",
    "PP2, packed": "TP2 x PP2 x CP2 with SP, packed, by tokens",
    "TP2 x PP2 x DP2, packed, by tokens": "TP2 x PP2 x CP2 with SP, packed, by tokens",
    "PP2 with VPP2, packed": "PP2 with VPP2, packed, by tokens",
    "CP2, packed": "CP2, learned positions, packed",
    "TP2 x EP2 with SP, packed, by tokens": "TP2 x PP2 x CP2 with SP, packed, by tokens; experts in test_layouts.py of "
    "router_replay",
    "TP2 x PP2 x EP2 with SP, router losses": "TP2 x PP2 x EP4 with SP, router losses",
}
"""Layouts of the page -> what has all their paths in float32; these are compared by ``make test-slow`` alone."""
EVERY_AXIS_IN_BFLOAT16 = (
    "CP2",
    "EP2, decisive routers",
    "PP2 x DP2, distributed optimizer with overlap",
    "one process, packed",
)
"""A dtype takes no separate path in a layout: each axis once."""
SLOW = [
    case
    for case in CASES
    if case[0] not in (EVERY_AXIS_IN_BFLOAT16 if case[1] == "bfloat16" else LAYOUTS.keys() - COVERED)
]


def assert_parity(name: str, dtype: str) -> None:
    """Assert that the layout computes what one process computes, within the tolerance."""
    largest = differences(name, dtype, run_ranks)
    assert largest.keys() == set(QUANTITIES)
    assert all(math.isfinite(value) and value <= TOLERANCES[dtype] for value in largest.values()), largest


def assert_decisive(name: str, dtype: str) -> None:
    """Assert that each router of every rank, and of one process, uses all experts, and that no choice is close."""
    layout = LAYOUTS[name]
    for case in (Case(1, {}, layout.model), layout):
        for routers in run_ranks(_routing, case.ranks, case, dtype):
            assert routers
            for margin, experts in routers:
                assert experts == EXPERTS
                assert margin > 2.0  # bfloat16 rounds these logits, which are below 4, by 1/128 at most


def _routing(case: Case, dtype: str) -> list[tuple[float, int]]:
    """Train, and return for each router of this rank its smallest margin, and the number of experts that it chose."""
    policy, value = workers_of(case, dtype, SMALL)
    shard = shard_of(policy, SMALL)
    with _recorded_routing([*policy.model, *value.model]) as routing:
        scores(policy, shard)
        call(value, "compute_values", shard)
        for _ in range(STEPS):
            call(policy, "update_actor", shard)
            call(value, "update_critic", shard)
    return [(min(margins), len(set().union(*experts))) for margins, experts in routing]


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


def _layout(name: str) -> Case:
    return LAYOUTS.get(name) or OF_MANY_RANKS[name]


@functools.cache
def differences(name: str, dtype: str, run: Callable[..., Any]) -> dict[str, float]:
    """Return the largest differences by quantity; ``run`` is ``run_ranks`` of simulated or forked ranks."""
    expected = _in_one_process(_layout(name).model, dtype, run)
    return ranks.differences([expected], of_every_rank(name, dtype, run))


@functools.cache
def of_every_rank(name: str, dtype: str, run: Callable[..., Any]) -> list[dict[str, Any]]:
    return run(computed, _layout(name).ranks, _layout(name), dtype)


@functools.cache
def _in_one_process(model: str, dtype: str, run: Callable[..., Any]) -> dict[str, Any]:
    return run(computed, 1, Case(1, {}, model), dtype)[0]
