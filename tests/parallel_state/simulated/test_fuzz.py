"""Random programs of collectives: the same as gloo, and with one fault always reported with its rank."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel_state import simulated
from parallel_state.simulated import SimulationError
from tests.forking import run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.simulated]

RANKS = 4
STEPS = 12
OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send")
FAULTS = ("skip", "shape", "dtype", "operation", "twice")


def program(seed: int) -> list[tuple[str, list[int], int]]:
    """Operation, group and number of elements of each step; the group has at least two ranks."""
    choose = random.Random(seed)
    steps = []
    for _ in range(STEPS):
        ranks = sorted(choose.sample(range(RANKS), choose.randint(2, RANKS)))
        steps.append((choose.choice(OPERATIONS), ranks, choose.randint(1, 40)))
    return steps


def run_program(seed: int, fault: tuple[int, int, str] | None = None) -> list[torch.Tensor]:
    """Run a program; the fault is its step, its rank and its kind."""
    steps = program(seed)
    groups = [dist.new_group(ranks) for _, ranks, _ in steps]
    results = []
    for index, (operation, ranks, elements) in enumerate(steps):
        if dist.get_rank() not in ranks:
            continue
        kind = fault[2] if fault is not None and fault[:2] == (index, dist.get_rank()) else ""
        results += _step(operation, ranks, elements, groups[index], kind)
    return results


def _step(operation: str, ranks: list[int], elements: int, group: Any, kind: str) -> list[torch.Tensor]:
    if kind == "skip":
        return []
    if kind == "operation":
        operation = "all_gather" if operation != "all_gather" else "all_reduce"
    dtype = torch.float64 if kind == "dtype" else torch.float32
    tensor = torch.full((elements + (kind == "shape"),), 1.1 + dist.get_rank(), dtype=dtype)
    results = [_call(operation, ranks, tensor, group)]
    if kind == "twice":
        results.append(_call(operation, ranks, tensor, group))
    return results


def _call(operation: str, ranks: list[int], tensor: torch.Tensor, group: Any) -> torch.Tensor:
    size, rank = len(ranks), dist.get_rank()
    output = torch.zeros(size * tensor.numel(), dtype=tensor.dtype)
    if operation == "all_reduce":
        dist.all_reduce(tensor, group=group)
        return tensor
    if operation == "broadcast":
        dist.broadcast(tensor, src=ranks[-1], group=group)
        return tensor
    if operation == "all_gather":
        dist.all_gather_into_tensor(output, tensor, group=group)
    elif operation == "reduce_scatter":
        dist.reduce_scatter_tensor(tensor, tensor.repeat(size), group=group)
        return tensor
    elif operation == "all_to_all":
        dist.all_to_all_single(output, tensor.repeat(size), group=group)
    elif rank == ranks[0]:
        dist.send(tensor, ranks[1], group=group)
    elif rank == ranks[1]:
        dist.recv(output := torch.empty_like(tensor), ranks[0], group=group)
    return output


def all_programs(seeds: list[int]) -> list[list[torch.Tensor]]:
    return [run_program(seed) for seed in seeds]


def test_random_programs_agree_with_gloo_in_every_order() -> None:
    seeds = list(range(8))
    expected = run_ranks(all_programs, RANKS, seeds)
    torch.testing.assert_close(simulated.run_ranks(RANKS, all_programs, seeds), expected, rtol=0, atol=0)
    random_order = simulated.run_ranks(RANKS, all_programs, seeds, seed=3)
    torch.testing.assert_close(random_order, expected, rtol=0, atol=0)


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_is_always_reported_and_its_rank_is_named(fault: str) -> None:
    choose = random.Random(fault)
    for seed in range(100, 106):
        steps = program(seed)
        candidates = [index for index, (operation, _, _) in enumerate(steps) if operation != "send"]
        index = choose.choice(candidates)
        rank = choose.choice(steps[index][1])
        with pytest.raises(SimulationError) as caught:
            simulated.run_ranks(RANKS, run_program, seed, (index, rank, fault))
        assert rank in caught.value.ranks, f"seed {seed}, step {index}, rank {rank}\n{caught.value}"
