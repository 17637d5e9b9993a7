"""Ranks that are stopped, or that leave a child with their connections, end a wait at its deadline, or at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from mcontroller import DataProto, Dispatch, register
from mcontroller.errors import CallTimeout, GroupError, WorkerDied
from mcontroller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from mcontroller.ray.calls import supervision
from tests.mcontroller.ray.batch_roles import Chained
from tests.mcontroller.ray.roles import Plain, end

Start = Callable[..., RayWorkerGroup]


class Forking(Plain):
    """Forks a child, which keeps the connections of the rank, and ends."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def leave_a_child_on(self, rank: int, path: str) -> None:
        if self.rank == rank:
            child = os.fork()
            if child == 0:
                os.setsid()
                time.sleep(600)
                os._exit(0)
            Path(path).write_text(str(child))
            os._exit(3)


class StopsAtTheEnd(Chained):
    """Rank 1 is stopped long after the others have finished."""

    def before_shutdown(self) -> None:
        if self.rank == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGSTOP)


class DiesAtTheEnd(Plain):
    def before_shutdown(self) -> None:
        if self.rank == 1:
            end("kill")


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    while "(stopped)" not in Path(f"/proc/{pid}/status").read_text():
        time.sleep(0.001)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # the end of the group has killed it
            os.kill(pid, signal.SIGKILL)


def rows() -> DataProto:
    return DataProto.from_dict({"ids": torch.arange(8).view(8, 1)})


def test_values_of_a_stopped_rank_end_at_the_deadline_of_get(pool: RayResourcePool, start: Start) -> None:
    group = start("rows", Chained)
    future = group.passed.options(blocking=False)(rows())
    assert future.wait(60)
    with stopped(group.pid()[1]), pytest.raises(CallTimeout) as caught:
        future.get(timeout=1)
    assert (caught.value.role, caught.value.method, caught.value.timeout) == ("rows", "passed", 1)
    assert "the process is stopped" in caught.value.stacks[1]
    assert caught.value.ranks == (1,) and pool.holders == []


def test_shutdown_does_not_wait_for_a_stopped_rank_or_its_values(
    pool: RayResourcePool, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "QUERY_SECONDS", 1.0)
    group = start("rows", StopsAtTheEnd)
    future = group.passed.options(blocking=False)(rows())
    assert future.wait(60)
    with pytest.raises(CallTimeout) as caught:
        group.shutdown(timeout=600)
    assert caught.value.ranks == (1,) and caught.value.timeout == 1.0
    assert pool.holders == []


def test_a_process_that_ends_while_it_finishes_is_reported(pool: RayResourcePool, start: Start) -> None:
    with pytest.raises(WorkerDied) as caught:
        start("rows", DiesAtTheEnd).shutdown()
    assert (caught.value.rank, caught.value.method) == (1, "before_shutdown")
    assert pool.holders == []


def test_a_fork_of_the_controller_neither_calls_nor_ends_the_group(pool: RayResourcePool, start: Start) -> None:
    group = start("forked")
    fork = os.fork()
    if fork == 0:
        signal.alarm(30)  # instead of hanging
        with suppress(GroupError):
            group.pid()
            os._exit(1)
        group.shutdown()
        pool.shutdown()
        os._exit(0)
    assert os.waitpid(fork, 0)[1] == 0
    assert len(group.pid()) == 2 and pool.holders == ["forked"]


def test_a_detached_group_with_a_stopped_rank_0_ends_at_the_deadline(ray_cluster: None) -> None:
    with RayResourcePool([2], use_gpu=False, name_prefix="lasting", detached=True) as pool:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Plain), name_prefix="lasting", detached=True)
        with stopped(group.pid()[0]), pytest.raises(CallTimeout) as caught:
            group.pid.options(timeout=1)()
        assert (caught.value.role, caught.value.method, caught.value.ranks) == ("lasting", "pid", (0,))
        assert pool.holders == []


def test_the_death_of_a_rank_whose_child_keeps_its_connections_is_found(start: Start, tmp_path: Path) -> None:
    group = start("parent", Forking)
    path = tmp_path / "child"
    try:
        with pytest.raises(WorkerDied) as caught:
            group.leave_a_child_on(1, str(path))
    finally:
        os.kill(int(path.read_text()), signal.SIGKILL)
    assert caught.value.rank == 1 and caught.value.exit_cause.startswith("exited with code 3")
