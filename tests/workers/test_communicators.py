"""The buffers of NCCL leave the GPU with a role, and come back before the next call that computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel_state.communicators import Communicators
from parallel_state.errors import ParallelStateError
from tests.forking import run_ranks
from tests.workers.roles import actor, experience, largest_difference, own_shard, weights

pytestmark = pytest.mark.processes

HAS_GPU = torch.cuda.is_available()


def trained(communicators: bool) -> dict[str, Any]:
    worker = actor({"tp": 2}, rollout={"prompt_length": 10, "response_length": 6})
    batch = own_shard(experience(8), worker)
    worker.update_actor(batch)
    freed, states, fails = [], [], []
    for _ in range(2):
        before = free_bytes()
        freed.append(worker.offload(parts=[], communicators=communicators))
        rest = free_bytes() - before - freed[-1]  # tables of rotary positions, which every offload drops
        states.append((worker.offloader.offloaded.parts, 0 <= rest < 1024))
        fails.append(_fails(worker))
        worker.update_actor(batch)
    return {"freed": freed, "states": states, "fails": fails, "weights": weights(worker)}


def free_bytes() -> int:
    if not HAS_GPU:
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def _fails(worker: Any) -> bool:
    """Whether a collective on the tp group is rejected now."""
    try:
        dist.all_reduce(torch.zeros(1, device=worker.device), group=worker.context.pg.tp)
    except RuntimeError as error:
        assert "suspended" in str(error)
        return True
    return False


def test_a_role_trains_on_after_its_communicators_were_freed() -> None:
    kept, freed = run_ranks(trained, 2, False), run_ranks(trained, 2, True)
    for without, rank in zip(kept, freed, strict=True):
        assert largest_difference(without["weights"], rank["weights"]) == 0.0
        assert without["freed"] == [0, 0] and not any(without["fails"])
        assert rank["states"] == [(("communicators",), True)] * 2
        assert all(size > 0 for size in rank["freed"]) == all(rank["fails"]) == HAS_GPU


class Old:
    def suspend(self) -> None:
        raise RuntimeError("Backend nccl does not support suspend")


def of_an_old_nccl() -> str:
    torch.cuda.nccl.version = lambda: (2, 27, 5)
    torch.cuda.synchronize = torch.cuda.mem_get_info = lambda: (0, 0)
    dist.get_backend = lambda group: "nccl"
    group = type("Group", (), {"_get_backend": lambda self, device: Old()})()
    with pytest.raises(ParallelStateError) as caught:
        Communicators([group]).sleep()
    return str(caught.value)


def test_an_nccl_that_cannot_free_its_buffers_is_named() -> None:
    (message,) = run_ranks(of_an_old_nccl, 1)
    assert "needs NCCL 2.29.7 or later" in message and "NCCL 2.27.5" in message
