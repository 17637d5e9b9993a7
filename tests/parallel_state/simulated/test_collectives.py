"""Simulated collectives against gloo's, on the same program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from parallel_state import simulated
from tests.forking import run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.simulated]


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of this rank over many orders of magnitude, so that another order of a sum has other bits."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return (torch.randn(shape, generator=generator) * 10 ** torch.randint(-3, 3, shape, generator=generator)).to(dtype)


def every_collective() -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    results: list[Any] = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        dist.all_reduce(total := values(77, dtype=dtype))
        dist.all_reduce(largest := values(5, dtype=dtype), op=dist.ReduceOp.MAX)
        results += [total, largest]
    dist.broadcast(sent := values(3), src=1)
    dist.reduce(reduced := values(40), dst=2)
    results += [sent, reduced if rank == 2 else None]
    dist.all_gather(parts := [torch.empty(2, 3) for _ in range(size)], values(2, 3))
    dist.all_gather_into_tensor(whole := torch.empty(2 * size), values(2))
    dist.reduce_scatter_tensor(part := torch.empty(6), values(6 * size))
    dist.reduce_scatter(listed := torch.empty(3), list(values(size, 3)))
    results += [parts, whole, part, listed]
    dist.gather(values(2), gathered := [torch.empty(2) for _ in range(size)] if rank == 0 else None, dst=0)
    dist.scatter(scattered := torch.empty(2), list(values(size, 2)) if rank == 3 else None, src=3)
    results += [gathered, scattered]
    dist.all_to_all_single(exchanged := torch.empty(size, 2), values(size, 2))
    dist.all_to_all_single(uneven := torch.empty(size * rank, 2), values(6, 2), [rank] * size, list(range(size)))
    results += [exchanged, uneven, *objects(rank, size), *transfers(rank, size)]
    results += [*functional_ones(rank, size), *coalesced_ones(rank, size)]
    subgroups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    dist.all_reduce(half := values(4), group=subgroups[rank % 2])
    dist.barrier()
    dist.monitored_barrier()
    return [*results, half]


def objects(rank: int, size: int) -> list[Any]:
    dist.all_gather_object(gathered := [None] * size, {"rank": rank})
    dist.broadcast_object_list(listed := [rank, [rank] * rank], src=3)
    dist.scatter_object_list(scattered := [None], [[index] for index in range(size)] if rank == 0 else None, src=0)
    dist.gather_object({"rank": rank}, on_one := [None] * size if rank == 2 else None, dst=2)
    sent = [[2, 3], {1: 2}] if rank == 0 else [None, None]
    if rank < 2:
        dist.recv_object_list(sent, 0) if rank else dist.send_object_list(sent, 1)
    return [gathered, listed, scattered, on_one, sent]


def transfers(rank: int, size: int) -> list[torch.Tensor]:
    received, sent = torch.empty(3), values(3)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, (rank + 1) % size), dist.P2POp(dist.irecv, received, (rank - 1) % size)]
    ):
        work.wait()
    if rank == 0:
        dist.send(sent, 1, tag=7)
    elif rank == 1:
        dist.recv(received, tag=7)
    return [received]


def functional_ones(rank: int, size: int) -> list[torch.Tensor]:
    world = dist.group.WORLD
    tensors = [
        functional.all_reduce(values(2), "sum", world),
        functional.all_gather_tensor(values(2), 0, world),
        functional.reduce_scatter_tensor(values(size), "sum", 0, world),
        functional.all_to_all_single(values(6), [rank] * size, list(range(size)), world),
        functional.broadcast(values(2), 1, world),
        *functional.all_reduce_coalesced([torch.ones(1), torch.ones(2)], "sum", world),
    ]
    return [tensor + 0 for tensor in tensors]  # which waits


def coalesced_ones(rank: int, size: int) -> list[torch.Tensor]:
    gathered, parts = [torch.empty(size), torch.empty(2 * size)], [torch.empty(1), torch.empty(2)]
    totals = [values(37), values(2, 5)]
    with dist._coalescing_manager():
        for total in totals:
            dist.all_reduce(total)
    with dist._coalescing_manager():
        for length, whole in enumerate(gathered, 1):
            dist.all_gather_into_tensor(whole, values(length))
    with dist._coalescing_manager():
        for length, part in enumerate(parts, 1):
            dist.reduce_scatter_tensor(part, values(size * length))
    return [*totals, *gathered, *parts]


@pytest.fixture(scope="module")
def of_gloo() -> list[list[Any]]:
    return run_ranks(every_collective, 4)


@pytest.mark.parametrize("seed", [None, 5])
def test_every_collective_has_the_bits_of_gloo(seed: int | None, of_gloo: list[list[Any]]) -> None:
    torch.testing.assert_close(simulated.run_ranks(4, every_collective, seed=seed), of_gloo, rtol=0, atol=0)


def test_split_sizes_may_be_arrays_and_tensors() -> None:
    def exchange() -> torch.Tensor:
        rank = dist.get_rank()
        output = torch.empty(2 * rank)
        dist.all_to_all_single(output, torch.full((1,), float(rank)), np.array([rank, rank]), torch.tensor([0, 1]))
        return output

    assert [tensor.tolist() for tensor in simulated.run_ranks(2, exchange)] == [[], [0.0, 1.0]]


def test_asynchronous_and_coalesced_calls_complete_at_their_wait() -> None:
    def plain() -> tuple[list[float], list[float]]:
        tensors = [torch.full((1,), float(dist.get_rank() + index)) for index in range(2)]
        work = dist.all_reduce(total := torch.ones(2), async_op=True)
        with dist._coalescing_manager(async_ops=True) as coalesced:
            for tensor in tensors:
                dist.all_reduce(tensor)
        coalesced.wait()
        while not work.is_completed():
            pass
        work.wait()
        return total.tolist(), [float(tensor) for tensor in tensors]

    assert simulated.run_ranks(3, plain) == [([3.0, 3.0], [3.0, 6.0])] * 3


def test_meshes_and_wrappers_of_torch_use_the_ranks() -> None:
    def compute() -> tuple[float, list[Any]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        doubled = distribute_tensor(torch.arange(8.0), mesh["shards"], [Shard(0)]) * 2
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
        return float(doubled.sum().full_tensor()), model.module.weight.grad.tolist()

    assert simulated.run_ranks(4, compute) == [(56.0, [[1.5, 1.5]])] * 4
