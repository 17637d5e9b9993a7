"""A broken group restarts as the same object; what was computed before raises GroupBroken."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mcontroller import DataProto
from mcontroller.errors import GroupBroken, ResourceError, WorkerDied
from mcontroller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, create_colocated_worker_cls
from tests.mcontroller.ray.batch_roles import Chained
from tests.mcontroller.ray.roles import Plain

Start = Callable[..., RayWorkerGroup]


def rows() -> DataProto:
    return DataProto.from_dict({"ids": torch.arange(8).view(8, 1)})


def killed(group: RayWorkerGroup, rank: int = 1) -> None:
    os.kill(group.pid()[rank], signal.SIGKILL)
    with pytest.raises(WorkerDied) as caught:
        group.pid()
    assert caught.value.exit_cause.startswith("killed by SIGKILL")


def test_a_broken_group_restarts_and_values_from_before_raise(pool: RayResourcePool, start: Start) -> None:
    group = start("rows", Chained)
    kept = group.passed.options(blocking=False)(rows())
    assert kept.wait(60)
    before, holders, method = group.pid(), pool.holders, group.passed
    killed(group)
    assert group.broken is not None and pool.holders == []
    group.restart()
    assert group.broken is None and pool.holders == holders
    assert set(group.pid()).isdisjoint(before)
    assert method(rows()).get() == rows()  # a method that was read before the restart
    for read in (kept.get, lambda: group.passed(kept)):
        with pytest.raises(GroupBroken) as caught:
            read()
        assert isinstance(caught.value.first_cause, WorkerDied)
    assert group.passed(rows()) == rows()  # the old batch did not break the new processes


def test_two_threads_that_restart_roles_of_the_same_processes_restart_them_once(ray_cluster: None) -> None:
    classes = {"left": RayClassWithInitArgs(Plain), "right": RayClassWithInitArgs(Plain)}
    with RayResourcePool([2], use_gpu=False, name_prefix="single") as single:
        group = RayWorkerGroup(single, create_colocated_worker_cls(classes), name_prefix="both")
        roles = group.spawn(["left", "right"])
        killed(roles["left"])
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(RayWorkerGroup.restart, roles.values()))
        assert roles["left"].pid() == roles["right"].pid() and roles["left"].broken is None
        group.shutdown()


def test_a_restart_without_a_slot_names_who_has_it_and_can_be_repeated(start: Start, ray_cluster: None) -> None:
    with RayResourcePool([1], use_gpu=False, name_prefix="single") as single:
        group = RayWorkerGroup(single, RayClassWithInitArgs(Plain), name_prefix="first")
        killed(group, 0)
        with RayWorkerGroup(single, RayClassWithInitArgs(Plain), name_prefix="second"):
            with pytest.raises(ResourceError) as no_slot:
                group.restart()
            assert no_slot.value.fields["holders"] == ["second"]
            with pytest.raises(GroupBroken) as caught:
                group.pid()
            assert isinstance(caught.value.first_cause, WorkerDied)
        group.restart()
        assert len(group.pid()) == 1
        group.shutdown()


def test_a_group_of_another_driver_is_not_restarted(ray_cluster: None) -> None:
    with RayResourcePool([1], use_gpu=False, name_prefix="lasting", detached=True) as pool:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Plain), name_prefix="lasting", detached=True)
        attached = RayWorkerGroup.from_detached("lasting")
        with pytest.raises(ResourceError):
            attached.restart()
        group.restart()
        assert len(group.pid()) == 1
        group.shutdown()


def test_a_pool_takes_other_bundles_after_another_driver_has_returned_those_of_its_last_group(
    ray_cluster: None,
) -> None:
    with RayResourcePool([1], use_gpu=False, name_prefix="lasting", detached=True) as pool:
        first = RayWorkerGroup(pool, RayClassWithInitArgs(Plain), name_prefix="first", detached=True)
        RayWorkerGroup.from_detached("first").shutdown()
        with pytest.raises(WorkerDied):
            first.pid()
        with RayWorkerGroup(pool, RayClassWithInitArgs(Plain), name_prefix="second", start_timeout=60) as second:
            assert len(second.pid()) == 1
