"""The collectives that gloo lacks or gets wrong, patched by ``cpu.install``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from parallel_state.errors import ParallelStateError
from tests.forking import run_ranks

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU"),
]

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


def sums_of_scaled_values() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    total, part = torch.tensor([2.0, 8.0]), torch.zeros(1)
    halves = dist._make_nccl_premul_sum(0.5)
    dist.reduce_scatter_tensor(part, given := total.clone(), op=halves)
    dist.all_reduce(total, op=halves)
    return [total, part, given], [torch.tensor([2.0, 8.0]), torch.tensor([(2.0, 8.0)[dist.get_rank()]]), total]


def all_gather_into_strided_tensors() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    parts = [torch.zeros(3, 4).t() for _ in range(2)]
    dist.all_gather(parts, torch.full((4, 3), dist.get_rank() + 1.0))
    return parts, [torch.full((4, 3), 1.0), torch.full((4, 3), 2.0)]


@pytest.mark.parametrize(
    "collective",
    [
        all_gather_of_unequal_shapes,
        reduce_scatter_of_unequal_shapes,
        reduce_scatter_of_booleans_is_any,
        all_reduce_of_booleans_is_any,
        sums_of_scaled_values,
        all_gather_into_strided_tensors,
    ],
    ids=lambda collective: collective.__name__,
)
def test_returns_the_correct_values(collective: Callable[[], tuple[object, object]]) -> None:
    for result, expected in run_ranks(collective, 2, timeout_s=30):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


STRIDED: dict[str, Callable[[torch.Tensor], object]] = {
    "scatter": lambda strided: dist.scatter(torch.zeros(4, 3), [strided, strided] if dist.get_rank() == 0 else None),
    "broadcast": lambda strided: dist.broadcast(strided, src=0),
    "reduce": lambda strided: dist.reduce(strided, dst=0),
    "all_reduce": dist.all_reduce,
    "all_gather": lambda strided: dist.all_gather([torch.zeros(4, 3)] * 2, strided),
    "all_gather_into_tensor": lambda strided: dist.all_gather_into_tensor(torch.zeros(8, 3), strided),
    "reduce_scatter_tensor": lambda strided: dist.reduce_scatter_tensor(torch.zeros(2, 3), strided),
    "all_to_all_single": lambda strided: dist.all_to_all_single(torch.zeros(4, 3), strided),
    "isend": lambda strided: dist.send(strided, 1),
    "irecv": lambda strided: dist.recv(strided, 1),
}


def errors_of_strided_tensors() -> list[str]:
    messages = []
    for collective in STRIDED.values() if dist.get_rank() == 0 else ():
        with pytest.raises(ParallelStateError) as caught:
            collective(WHOLE.clone()[:, ::2])
        messages.append(str(caught.value))
    return messages


def test_tensors_that_are_not_contiguous_are_rejected_as_nccl_does() -> None:
    messages = run_ranks(errors_of_strided_tensors, 2, timeout_s=30)[0]
    assert [message.split()[0] for message in messages] == list(STRIDED)
    assert "of a tensor of shape (4, 3) with strides (6, 2); expected a contiguous tensor" in messages[0]


def send_and_deallocate(count: int, size: int) -> bool:
    """Rank 0 sets the data of each tensor while it is sent, as Megatron's pipeline does; rank 1 compares."""
    if dist.get_rank() == 1:
        dist.barrier()
        received = torch.empty(size)
        same = []
        for index in range(count):
            dist.recv(received, 0)
            same.append(bool((received == index).all()))
        return all(same)
    works = []
    for index in range(count):
        output = torch.full((size,), float(index))
        works.append(dist.isend(output, 1))
        output.data = torch.empty(1)
        torch.full((size,), -1.0)  # takes the memory, if it was freed
    dist.barrier()
    for work in works:
        work.wait()
    return True


def test_a_tensor_that_is_deallocated_while_it_is_sent_arrives() -> None:
    assert run_ranks(send_and_deallocate, 2, 20, 1 << 20) == [True, True]
