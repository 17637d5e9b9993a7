"""Weights through a process group over NCCL, as its stand-in behaves: a lost peer is an error, and nothing else."""

from __future__ import annotations

import datetime
import faulthandler
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.fake_cuda.nccl_group import ProcessGroupNCCL
from tests.forking import RankFailure, run_ranks
from workers.weights.moves import Move
from workers.weights.transfer.endpoint import Deadline, PeerLost, ProcessGroup
from workers.weights.transfer.plan import PeerSlices, RankSchedule

pytestmark = pytest.mark.processes

NBYTES = 64
MOVE = Move("uint8", 0, NBYTES, NBYTES, 0, 0, 0, 1, 0, 0)


def end(timeout: float, buckets: int = 1) -> tuple[Any, dict[int, Any]]:
    """Return this rank's end, of a transfer of equal buckets from rank 0 to rank 1, and the addresses."""
    rank = dist.get_rank()
    planned = ((PeerSlices(1 - rank, 0, NBYTES, (MOVE,)),),) * buckets
    schedule = RankSchedule(
        transfer="one",
        transport="process_group",
        rank=rank,
        size=2,
        sources=1,
        buckets=planned,
        timeout=timeout,
    )
    mine = ProcessGroup(schedule, torch.device("cuda", rank), "127.0.0.1")
    addresses = [mine.listen()]
    dist.broadcast_object_list(addresses, src=0)
    return mine, {0: addresses[0]}


def received() -> list[int]:
    mine, addresses = end(30)
    mine.connect(addresses)
    if dist.get_rank() == 0:
        mine.buffer(0).copy_(torch.arange(NBYTES, dtype=torch.uint8, device="cuda"))
        mine.send(0)
        arrived = []
    else:
        ((_, data),) = mine.receive(0)
        arrived = data.tolist()
    mine.flush()
    dist.barrier()
    mine.close()
    return arrived


def test_bytes_arrive() -> None:
    assert run_ranks(received, 2, timeout_s=40) == [[], list(range(NBYTES))]


def unreceived() -> str:
    """Rank 1 connects and never receives; the group's timeout ends before the deadline."""
    mine, addresses = end(0.5)
    mine.connect(addresses)
    mine.deadline = Deadline(30)
    error = ""
    if dist.get_rank() == 0:
        mine.send(0)
        with pytest.raises(PeerLost) as raised:
            mine.flush()
        error = raised.value.cause
    dist.barrier()
    mine.close()
    return error


def test_a_transfer_that_times_out_does_not_end_the_process_that_sends() -> None:
    assert "operation timeout" in run_ranks(unreceived, 2, timeout_s=40)[0]


def slow() -> list[int]:
    """Rank 1 posts two receives, and waits for the second 20 s after it was posted, with a deadline of 10 s."""
    mine, addresses = end(30, buckets=2)
    mine.connect(addresses)
    arrived = []
    if dist.get_rank() == 0:
        for index in range(2):
            if index == 1:
                dist.recv(torch.zeros(1, device="cuda"), 1)
            mine.buffer(index).fill_(index + 1)
            mine.send(index)
    else:
        arrived += [data[0].item() for _, data in mine.receive(0)]
        for work in mine._group._works:
            work.started -= 20
        dist.send(torch.zeros(1, device="cuda"), 0)
        mine.deadline = Deadline(10)
        arrived += [data[0].item() for _, data in mine.receive(1)]
    dist.barrier()
    mine.close()
    return arrived


def test_a_wait_lasts_until_its_deadline() -> None:
    assert run_ranks(slow, 2, timeout_s=40) == [[], [1, 2]]


def absent() -> tuple[int, str]:
    mine, addresses = end(0.5)
    failure = -1, ""
    if dist.get_rank() == 0:
        with pytest.raises(PeerLost) as raised:
            mine.connect(addresses)
            mine.send(0)
            mine.flush()
        failure = raised.value.peer, str(raised.value)
    dist.barrier()
    mine.close()
    return failure


def test_a_peer_that_never_connects_is_lost_at_the_deadline() -> None:
    (peer, text), _ = run_ranks(absent, 2, timeout_s=15)
    assert peer == 1 and "rank 1 of the transfer" in text


def unhandled() -> None:
    faulthandler.disable()  # the stacks of an end that is expected
    options = ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(seconds=0.2)
    group = ProcessGroupNCCL(dist.distributed_c10d._get_default_store(), dist.get_rank(), 2, options)
    group.recv([torch.zeros(1, device="cuda")], 1 - dist.get_rank(), 0).wait()  # nobody sends


def test_the_stand_in_ends_a_process_whose_timeout_nothing_handles() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(unhandled, 2, timeout_s=20)
    assert caught.value.traceback == ""  # a rank has died
