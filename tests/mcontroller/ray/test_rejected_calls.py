"""Calls that every rank rejects before it has changed anything leave the group usable."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mcontroller import Dispatch, Worker, before_changes, register
from mcontroller.errors import CallRejected, ConfigError, DataError, GroupBroken, WorkerError
from mcontroller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from mcontroller.testing import mock_worker_group, simulated_worker_group
from parallel_state import ParallelLayout


class Careful(Worker):
    """Rejects negative numbers; a rank can be made to differ."""

    def __init__(self) -> None:
        self.total = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, number: int, only: int | None = None, otherwise: str = "return") -> int:
        if only in (None, self.rank):
            with before_changes():
                if number < 0:
                    raise ConfigError(f"number is {number}; it must be at least 0", key="number")
        elif otherwise == "raise":
            raise ValueError("something else")
        elif otherwise == "wait":
            threading.Event().wait()
        self.total += number
        return self.total

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def lock(self, value: Any = None) -> Any:
        return threading.Lock()


@pytest.fixture
def on_ray(ray_cluster: None) -> Iterator[RayWorkerGroup]:
    with (
        RayResourcePool([2], use_gpu=False) as pool,
        RayWorkerGroup(pool, RayClassWithInitArgs(Careful), name_prefix="careful") as group,
    ):
        yield group


def reject_and_go_on(group: Any) -> None:
    assert group.add(1) == [1, 1]
    with pytest.raises(CallRejected) as caught:
        group.add(-1)
    assert (caught.value.role, caught.value.method, caught.value.rank) == ("careful", "add", 0)
    assert caught.value.cause.startswith("ConfigError: number is -1")
    assert "number < 0" in caught.value.worker_traceback or "in add" in caught.value.worker_traceback
    future = group.add.options(blocking=False)(-2)
    assert group.add(2) == [3, 3]  # a rejected call that has not been read is not a failure of the next one
    for _ in range(2):
        with pytest.raises(CallRejected) as caught:
            future.get()
        assert "number is -2" in caught.value.cause
    assert group.add(1) == [4, 4]


def reject_on_one_rank(group: Any, otherwise: str) -> None:
    with pytest.raises(WorkerError) as caught:
        group.add(-1, 0, otherwise)
    assert not isinstance(caught.value, CallRejected)
    with pytest.raises(GroupBroken):
        group.add(1)


@pytest.mark.parametrize("make", [mock_worker_group, simulated_worker_group])
def test_a_group_is_usable_after_a_call_that_all_ranks_rejected(make: Any) -> None:
    reject_and_go_on(make(Careful, ParallelLayout(2), name="careful"))


def test_a_group_on_ray_is_usable_after_a_call_that_all_ranks_rejected(on_ray: RayWorkerGroup) -> None:
    reject_and_go_on(on_ray)


@pytest.mark.parametrize("otherwise", ["return", "raise"])
@pytest.mark.parametrize("make", [mock_worker_group, simulated_worker_group])
def test_ranks_that_disagree_break_the_group(make: Any, otherwise: str) -> None:
    reject_on_one_rank(make(Careful, ParallelLayout(2), name="careful"), otherwise)


@pytest.mark.parametrize("otherwise", ["return", "raise"])
def test_ranks_that_disagree_break_the_group_on_ray(on_ray: RayWorkerGroup, otherwise: str) -> None:
    reject_on_one_rank(on_ray, otherwise)


def test_a_rank_that_does_not_follow_breaks_the_group_soon(on_ray: RayWorkerGroup) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        on_ray.add(-1, 1, "wait")
    assert caught.value.rank == 1 and "number is -1" in caught.value.cause
    assert time.monotonic() - began < 20
    with pytest.raises(GroupBroken):
        on_ray.add(1)


class Unreadable:
    """Can be sent, and not read."""

    def __reduce__(self) -> Any:
        return eval, ("1 / 0",)


def test_what_cannot_be_sent_or_read_does_not_break_a_group(on_ray: RayWorkerGroup) -> None:
    with pytest.raises(DataError) as caught:
        on_ray.lock()
    assert caught.value.kind == "lock"
    future = on_ray.lock.options(blocking=False)()
    with pytest.raises(DataError):
        future.get()
    with pytest.raises(DataError) as caught:
        on_ray.lock(threading.Lock())
    assert caught.value.location == "argument 0"
    with pytest.raises(CallRejected):
        on_ray.lock(Unreadable())
    assert on_ray.add(1) == [1, 1]
