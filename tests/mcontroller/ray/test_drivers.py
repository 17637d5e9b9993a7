"""Several drivers: the end of one, and the groups that another finds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
import ray
from ray.util import placement_group_table

from mcontroller.channel.controller import ask
from mcontroller.errors import CallTimeout, ResourceError
from mcontroller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from tests.mcontroller.ray.roles import Plain

PRELUDE = """
import ray
from mcontroller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from tests.mcontroller.ray.roles import Plain
ray.init(address={address!r}, logging_level="ERROR", log_to_driver=False)
pool = RayResourcePool([2], use_gpu=False, detached={detached}, warm_start={warm_start})
group = RayWorkerGroup(pool, RayClassWithInitArgs(Plain, "kept"), name_prefix={name!r}, detached={detached})
print(*group.pid(), flush=True)
"""


def driver(then: str, name: str = "other", detached: bool = False, warm_start: bool = False) -> subprocess.Popen[str]:
    """Another driver on the same cluster, which starts a group, prints its pids, and does what ``then`` says.

    A warm parent, which each driver has for itself, imports torch: the workers of these tests do not need it.
    """
    address = ray.get_runtime_context().gcs_address
    prelude = PRELUDE.format(address=address, name=name, detached=detached, warm_start=warm_start)
    command = [sys.executable, "-c", prelude + textwrap.dedent(then)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def calling(name: str, mark: str, count: int) -> subprocess.Popen[str]:
    """Another driver, which calls ``note`` of a detached group ``count`` times."""
    address = ray.get_runtime_context().gcs_address
    program = f"""
    import ray
    from mcontroller.ray import RayWorkerGroup
    ray.init(address={address!r}, logging_level="ERROR", log_to_driver=False)
    group = RayWorkerGroup.from_detached({name!r})
    for number in range({count}):
        group.note({mark!r}, number)
    """
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], text=True, env=environment)


def pids_of(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


def gone(pids: list[int], seconds: float = 60) -> bool:
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return not psutil.wait_procs(processes, timeout=seconds)[1]


def once_busy(name: str) -> RayWorkerGroup:
    """Another driver's detached group, which this one has found while a call of the other's was running."""
    while True:
        group = RayWorkerGroup.from_detached(name, timeout=1)
        addresses = [info.address for info in group.executor.processes.handles.infos]
        if not all(answer and answer[0] for answer in ask(addresses, "idle", timeout=20)):
            return group
        time.sleep(0.05)


def test_a_driver_that_is_killed_in_a_call_takes_its_processes_along(ray_cluster: None) -> None:
    process = driver("group.patient_on(1)", warm_start=True)
    pids = pids_of(process)
    process.kill()
    assert process.wait(120) != 0
    assert gone(pids)


CONNECT_AGAIN = """
address = ray.get_runtime_context().gcs_address
ray.shutdown()
ray.init(address=address, logging_level="ERROR", log_to_driver=False)
again = RayWorkerGroup(pool, RayClassWithInitArgs(Plain, "kept"), name_prefix="again")
print(*again.pid(), flush=True)
again.fail_later_on({1: "unseen"})
"""


def test_a_driver_that_ends_takes_its_processes_along_also_after_a_failed_call(ray_cluster: None) -> None:
    """It has connected twice, and used its pool each time."""
    process = driver(CONNECT_AGAIN)
    before, after = pids_of(process), pids_of(process)
    assert len({*before, *after}) == 4
    assert process.wait(120) == 0
    assert gone([*before, *after])


def test_a_detached_group_outlives_its_driver_and_is_found_by_name(ray_cluster: None) -> None:
    process = driver("", name="lasting", detached=True)
    pids = pids_of(process)
    assert process.wait(120) == 0
    group = RayWorkerGroup.from_detached("lasting")
    assert group.pid() == pids
    assert group.get() == ["kept", "kept"]
    names = group.worker_names
    assert RayWorkerGroup.from_detached(worker_names=names[::-1]).pid() == pids
    with pytest.raises(ResourceError) as caught:
        RayWorkerGroup.from_detached(worker_names=names[:1])
    assert caught.value.fields["expected"] == names
    group.shutdown()
    assert gone(pids)
    assert ray.available_resources()["CPU"] >= 2
    with pytest.raises(ResourceError) as caught:
        RayWorkerGroup.from_detached("lasting")
    assert caught.value.fields["name"] == "lasting"


def test_all_ranks_run_the_calls_of_three_drivers_in_one_order(ray_cluster: None) -> None:
    starter = driver("", name="shared", detached=True)
    assert pids_of(starter)
    assert starter.wait(120) == 0
    group = RayWorkerGroup.from_detached("shared")
    others = [calling("shared", mark, 30) for mark in ("a", "b")]
    count = 0
    while any(process.poll() is None for process in others):  # so that calls of all three meet
        group.note("c", count)
        count += 1
        time.sleep(0.001)
    assert [process.wait(120) for process in others] == [0, 0]
    first, second = group.noted()
    group.shutdown()
    assert first == second
    for mark, sent in {"a": 30, "b": 30, "c": count}.items():
        assert [number for caller, number in first if caller == mark] == list(range(sent))


def test_a_detached_group_of_a_driver_that_died_is_ended_by_the_next_driver(
    ray_cluster: None,
) -> None:
    process = driver(
        """
        from tests.mcontroller.ray.roles import RaisesInInit as BlocksOnRank0
        pool = RayResourcePool([1], use_gpu=False, detached=True, warm_start=False)
        RayWorkerGroup(pool, RayClassWithInitArgs(BlocksOnRank0), name_prefix="halfway", detached=True)
        """
    )
    pids_of(process)

    def error_of_attach() -> str:
        with pytest.raises(ResourceError) as caught:
            RayWorkerGroup.from_detached("halfway")
        return str(caught.value)

    while "no detached group named" in error_of_attach():
        time.sleep(0.05)
    assert "is still starting group halfway/" in error_of_attach()
    process.kill()
    process.wait(120)
    while "is still starting group halfway/" in (text := error_of_attach()):
        time.sleep(0.05)
    assert "ended before its start was complete" in text
    while "no detached group named" not in error_of_attach():
        time.sleep(0.05)
    assert not any(entry["state"] == "CREATED" for entry in placement_group_table().values())


def test_a_detached_group_that_hangs_is_found_and_ended_by_another_driver(ray_cluster: None) -> None:
    process = driver("group.patient_on(1)", name="hanging", detached=True)
    pids = pids_of(process)
    group = once_busy("hanging")
    process.kill()
    process.wait(120)
    with pytest.raises(CallTimeout) as caught:
        group.get()
    assert any("in patient_on" in stack for stack in caught.value.stacks.values())
    assert gone(pids)


def test_a_detached_group_that_is_busy_is_ended_at_once(ray_cluster: None) -> None:
    process = driver("group.patient_on(1)", name="busy", detached=True)
    pids = pids_of(process)
    once_busy("busy").shutdown()
    assert gone(pids)
    assert process.wait(120) != 0


def test_processes_that_do_not_exist_are_named(ray_cluster: None) -> None:
    with pytest.raises(ResourceError) as caught:
        RayWorkerGroup.from_detached(worker_names=["nobody/1234/0"])
    assert caught.value.fields["missing"] == ["nobody/1234/0"]


def test_a_live_group_that_is_not_detached_is_named_with_the_fix(ray_cluster: None) -> None:
    with (
        RayResourcePool([1], use_gpu=False) as pool,
        RayWorkerGroup(pool, RayClassWithInitArgs(Plain), name_prefix="attached") as group,
    ):
        for find in ({"worker_names": group.worker_names}, {"name_prefix": "attached"}):
            with pytest.raises(ResourceError) as caught:
                RayWorkerGroup.from_detached(**find)
            assert "detached=True" in str(caught.value)


def test_two_jobs_with_groups_of_one_name_do_not_collide_and_one_without_a_rank_is_ended(
    ray_cluster: None,
) -> None:
    processes = [driver("", name="same", detached=True) for _ in range(2)]
    pids = [pids_of(process) for process in processes]
    assert [process.wait(120) for process in processes] == [0, 0]
    with pytest.raises(ResourceError) as caught:
        RayWorkerGroup.from_detached("same")
    assert len(caught.value.groups) == 2
    os.kill(pids[0][1], signal.SIGKILL)
    while len(ray.util.list_named_actors(all_namespaces=True)) == 4:
        time.sleep(0.01)
    dead = []
    for group in caught.value.groups:
        try:
            RayWorkerGroup.from_detached(worker_names=[f"{group}/{rank}" for rank in range(2)]).shutdown()
        except ResourceError as error:
            dead += error.missing
    assert [name[-2:] for name in dead] == ["/1"]
    assert gone([pid for pids_of_job in pids for pid in pids_of_job])
