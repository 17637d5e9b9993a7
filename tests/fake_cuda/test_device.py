"""The fake CUDA device behaves as CUDA does where it matters to the GPU path."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.fake_cuda.tags import initialization, traffic
from tests.forking import RankFailure, run_ranks

pytestmark = pytest.mark.processes

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_traffic_yet() -> None:
    traffic.clear()


MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "a factory": lambda: torch.ones(2, 3, device="cuda"),
    "an index": lambda: torch.ones(2, 3, device=0),
    "new_*": lambda: torch.ones(1, device="cuda").new_zeros(2, 3),
    "*_like": lambda: torch.zeros_like(torch.ones(2, 3, device="cuda")),
    "to a device": lambda: torch.ones(2, 3).to("cuda"),
    "to a device and dtype": lambda: torch.ones(2, 3).to("cuda", torch.bfloat16),
    "to another tensor's": lambda: torch.ones(2, 3).to(torch.ones(1, device="cuda")),
    "cuda()": lambda: torch.ones(2, 3).cuda(),
    "arithmetic": lambda: torch.ones(2, 3, device="cuda") * 2 + 1,
    "a view": lambda: torch.ones(6, device="cuda").view(2, 3)[:1],
    "a scalar of the host": lambda: torch.ones(2, device="cuda") * torch.tensor(2.0),
    "an index of the host": lambda: torch.ones(3, device="cuda")[torch.tensor([0, 2])],
    "a module": lambda: torch.nn.Linear(3, 2).to("cuda").weight,
    "a module moved twice": lambda: torch.nn.Linear(3, 2).cuda().to(CUDA).bfloat16().weight,
    "a gradient": lambda: _gradient(torch.ones(3, device="cuda", requires_grad=True)),
    "a copy": lambda: torch.ones(3, device="cuda").clone().detach(),
}


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    (tensor.exp().sum() * torch.tensor(2.0)).backward()
    assert tensor.grad is not None
    return tensor.grad


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_what_is_made_on_the_device_is_there(make: Callable[[], torch.Tensor]) -> None:
    made = make()
    assert (made.device, made.is_cuda, made.is_cpu, made.get_device()) == (CUDA, True, False, 0)


def test_what_comes_back_is_on_the_host() -> None:
    tensor = torch.arange(3, device="cuda")
    assert tensor.cpu().device == CPU
    assert tensor.to("cpu").tolist() == [0, 1, 2]
    assert torch.empty(3, dtype=torch.long).copy_(tensor).numpy().tolist() == [0, 1, 2]
    assert traffic.counts["device_to_host"] == 3


MIXTURES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "addition": lambda here, there: here + there,
    "a product": lambda here, there: here @ there,
    "concatenation": lambda here, there: torch.cat([here, there]),
    "an update in place": lambda here, there: here.add_(there),
    "an index on the device": lambda here, there: here[there.long()],
    "assignment": lambda here, there: there.index_put_((torch.tensor([0]),), here[:1]),
    "an embedding": lambda here, there: torch.nn.functional.embedding(here.long(), there.view(-1, 1)),
}


@pytest.mark.parametrize("mix", MIXTURES.values(), ids=MIXTURES)
def test_operands_on_two_devices_are_rejected(mix: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    with pytest.raises(RuntimeError):
        mix(torch.ones(3), torch.ones(3, device="cuda"))


def test_numpy_takes_no_tensor_of_the_device() -> None:
    with pytest.raises(TypeError):
        torch.ones(2, device="cuda").numpy()


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda tensor: tensor.sum().item(),
    "tolist": lambda tensor: tensor.tolist(),
    "nonzero": lambda tensor: tensor.nonzero(),
    "masked_select": lambda tensor: tensor[tensor > 0],
    "bool": lambda tensor: bool(tensor.any()),
    "cpu": lambda tensor: tensor.cpu(),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_waiting_for_the_device_is_counted(wait: Callable[[torch.Tensor], object]) -> None:
    tensor = torch.ones(3, device="cuda")
    (tensor * 2).sum()
    assert traffic.synchronisations == 0
    wait(tensor)
    assert traffic.synchronisations >= 1


def _reduce(case: str) -> list[float]:
    tensor = torch.full((2, 2), float(dist.get_rank() + 1), device="cpu" if case == "host" else "cuda")
    dist.all_reduce(tensor.t()[:1] if case == "strided" else tensor)
    return tensor.flatten().tolist()


def test_collectives_of_the_device_compute() -> None:
    assert run_ranks(_reduce, 2, "device") == [[3.0] * 4] * 2


@pytest.mark.parametrize("case", ["host", "strided"])
def test_what_nccl_rejects_is_rejected(case: str) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(_reduce, 2, case)
    assert "all_reduce" in caught.value.traceback


def first_use() -> tuple[bool, bool, str]:
    initialization.forget()  # joining torch.distributed has used it
    before = torch.cuda.is_initialized()
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    torch.ones(1, device="cuda")
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    torch.cuda.set_device(0)
    return before, torch.cuda.is_initialized(), initialization.variables["CUDA_DEVICE_MAX_CONNECTIONS"]


def test_variables_are_read_at_the_first_use() -> None:
    assert run_ranks(first_use, 1) == [(False, True, "1")]


def test_a_child_that_is_forked_after_the_first_use_cannot_use_it() -> None:
    torch.ones(1, device="cuda")
    with pytest.raises(RankFailure) as caught:
        run_ranks(torch.cuda.current_device, 1)
    assert caught.value.traceback  # it has raised, and not died
