"""Compare every layout with one process, on simulated or forked ranks; which layouts run in which tier of the tests."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from tests.ranks import run_ranks
from workers.gpucheck import layouts
from workers.gpucheck.cases import DECISIVE, EXPERTS, Case
from workers.gpucheck.layouts import LAYOUTS, QUANTITIES, TOLERANCES, computed

__all__ = ["DECISIVE", "LAYOUTS", "QUANTITIES", "TOLERANCES", "computed", "differences"]

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
    """Return the largest differences by quantity; ``run`` is ``run_ranks`` of simulated or forked ranks."""
    expected = _in_one_process(_layout(name).model, dtype, run)
    return layouts.differences(expected, of_every_rank(name, dtype, run))


@functools.cache
def of_every_rank(name: str, dtype: str, run: Callable[..., Any]) -> list[dict[str, Any]]:
    return run(computed, _layout(name).ranks, _layout(name), dtype)


@functools.cache
def _in_one_process(model: str, dtype: str, run: Callable[..., Any]) -> dict[str, Any]:
    return run(computed, 1, Case(1, {}, model), dtype)[0]
