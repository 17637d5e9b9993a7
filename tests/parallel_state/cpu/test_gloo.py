"""The collectives that gloo lacks or gets wrong, patched by ``cpu.install``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.forking import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")

WHOLE = torch.arange(24.0).view(4, 6)


def all_gather_of_unequal_shapes() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    parts = [torch.zeros(2 + rank, 3) for rank in range(2)]
    dist.all_gather(parts, torch.full((2 + dist.get_rank(), 3), dist.get_rank() + 1.0))
    return parts, [torch.full((2 + rank, 3), rank + 1.0) for rank in range(2)]


def reduce_scatter_of_unequal_shapes() -> tuple[torch.Tensor, torch.Tensor]:
    mine = torch.zeros(1 + dist.get_rank())
    dist.reduce_scatter(mine, [torch.tensor([1.0]), torch.tensor([2.0, 3.0])])
    return mine, (torch.tensor([2.0]), torch.tensor([4.0, 6.0]))[dist.get_rank()]


def reduce_scatter_of_booleans_is_any() -> tuple[torch.Tensor, torch.Tensor]:
    mine = torch.zeros(2, dtype=torch.bool)
    everything = torch.tensor([[True, False, False, False], [True, True, False, False]])[dist.get_rank()]
    dist.reduce_scatter_tensor(mine, everything)
    return mine, torch.tensor([[True, True], [False, False]])[dist.get_rank()]


def all_reduce_of_booleans_is_any() -> tuple[torch.Tensor, torch.Tensor]:
    tensor = torch.tensor([True, dist.get_rank() == 0, False])
    dist.all_reduce(tensor)
    return tensor.view(torch.uint8), torch.tensor([1, 1, 0], dtype=torch.uint8)


def scatter_of_columns() -> tuple[torch.Tensor, torch.Tensor]:
    mine = torch.zeros(4, 3)
    dist.scatter(mine, list(WHOLE.chunk(2, 1)) if dist.get_rank() == 0 else None, src=0)
    return mine, WHOLE.chunk(2, 1)[dist.get_rank()]


def broadcast_into_a_transposed_tensor() -> tuple[torch.Tensor, torch.Tensor]:
    tensor = WHOLE.clone() if dist.get_rank() == 0 else torch.zeros(6, 4).t()
    dist.broadcast(tensor, src=0)
    return tensor, WHOLE


def asynchronous_broadcast_of_a_strided_tensor() -> tuple[torch.Tensor, torch.Tensor]:
    tensor = (WHOLE if dist.get_rank() == 0 else torch.zeros(4, 6)).clone()[:, ::2]
    assert dist.broadcast(tensor, src=0, async_op=True).wait()
    return tensor, WHOLE[:, ::2]


def all_reduce_of_a_strided_tensor() -> tuple[torch.Tensor, torch.Tensor]:
    tensor = WHOLE.clone()[:, ::2]
    dist.all_reduce(tensor)
    return tensor, 2 * WHOLE[:, ::2]


def all_reduce_of_a_transposed_tensor() -> tuple[torch.Tensor, torch.Tensor]:
    tensor = WHOLE.clone().t()
    assert dist.all_reduce(tensor, async_op=True).wait()
    return tensor, 2 * WHOLE.t()


@pytest.mark.parametrize(
    "collective",
    [
        all_gather_of_unequal_shapes,
        reduce_scatter_of_unequal_shapes,
        reduce_scatter_of_booleans_is_any,
        all_reduce_of_booleans_is_any,
        scatter_of_columns,
        broadcast_into_a_transposed_tensor,
        asynchronous_broadcast_of_a_strided_tensor,
        all_reduce_of_a_strided_tensor,
        all_reduce_of_a_transposed_tensor,
    ],
    ids=lambda collective: collective.__name__,
)
def test_returns_the_correct_values(collective: Callable[[], tuple[object, object]]) -> None:
    for result, expected in run_ranks(collective, 2, timeout_s=30):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
