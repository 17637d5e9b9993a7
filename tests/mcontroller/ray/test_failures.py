from __future__ import annotations

import gc
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.util import list_named_actors

from mcontroller.errors import CallTimeout, GroupBroken, GroupError, WorkerDied, WorkerError
from mcontroller.ray import RayResourcePool, RayWorkerGroup, launch
from mcontroller.ray.executor import RayExecutor
from mcontroller.ray.failures import is_follower
from tests.mcontroller.ray.roles import DiesInInit, Plain, RaisesInInit

Start = Callable[..., RayWorkerGroup]

SOON = 10
"""Seconds that a machine under load may take for what takes a fraction of one; nothing here waits for a deadline."""


def runs(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def test_an_exception_arrives_at_once_and_says_who_and_where(start: Start) -> None:
    group = start("actor")
    pids = group.pid()
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"actor rank 1 on .* failed in fail_on: ValueError: no such thing") as caught:
        group.fail_on({1: "no such thing"})
    assert time.monotonic() - began < SOON
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.role, error.rank, error.method, error.pid) == ("actor", 1, "fail_on", pids[1])
    assert error.node == group.executor.nodes[1]
    assert error.coordinates == {}
    assert error.cause == "ValueError: no such thing"
    assert "raise ValueError(causes[self.rank])" in error.worker_traceback
    assert "run_method" not in error.worker_traceback
    assert error.followers == 0


def test_coordinates_are_told_once_they_are_known(start: Start) -> None:
    group = start("actor")
    group.executor.place([{"tp": 0, "pp": 0}, {"tp": 1, "pp": 0}])
    with pytest.raises(WorkerError, match=r"actor rank 1 \(tp=1 pp=0\)") as caught:
        group.fail_on({1: "x"})
    assert caught.value.coordinates == {"tp": 1, "pp": 0}


def test_the_cause_comes_first_and_its_followers_are_counted(start: Start) -> None:
    group = start()
    with pytest.raises(WorkerError, match="1 other rank failed after it") as caught:
        group.fail_on({0: "recv: Connection closed by peer [10.0.0.1]", 1: "out of memory"})
    assert (caught.value.rank, caught.value.cause, caught.value.followers) == (1, "ValueError: out of memory", 1)


def test_what_a_lost_peer_makes_a_rank_say_is_known() -> None:
    assert is_follower("RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242")
    assert is_follower("DistBackendError: NCCL error: remote process exited or there was a network error")
    assert not is_follower("ValueError: the batch has no column 'values'")


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_process_that_dies_is_told_with_the_last_lines_of_its_log(start: Start, how: str) -> None:
    group = start("critic")
    pids = group.pid()
    began = time.monotonic()
    with pytest.raises(WorkerDied, match=r"critic rank 1 on .* died in die_on") as caught:
        group.die_on(1, how)
    assert time.monotonic() - began < SOON
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.role, error.rank, error.pid, error.method) == ("critic", 1, pids[1], "die_on")
    assert "worker process has died" in error.exit_cause
    assert error.log_tail.splitlines()[-1] == "the last words of a rank"


def test_a_method_that_exits_the_interpreter_is_told_as_its_failure(start: Start) -> None:
    with pytest.raises(WorkerError) as caught:
        start().die_on(0, "sys.exit")
    assert caught.value.cause == "SystemExit: 3"


def test_the_first_failure_stops_the_peers_and_later_calls_are_told_the_cause(
    pool: RayResourcePool, start: Start
) -> None:
    group = start("actor")
    pids = group.pid()
    with pytest.raises(WorkerError) as first:
        group.fail_on({0: "boom"})
    assert not any(map(runs, pids))
    with pytest.raises(GroupBroken, match="ValueError: boom") as later:
        group.pid()
    assert later.value.first_cause is first.value
    assert pool.tenants == []


def test_a_failure_nobody_waited_for_breaks_the_next_call(start: Start) -> None:
    group = start()
    future = group.fail_later_on({1: "unseen"})
    assert future.wait(60)
    with pytest.raises(GroupBroken, match="ValueError: unseen"):
        group.pid()
    with pytest.raises(GroupError):
        future.get()


def test_a_call_behind_a_failed_one_does_not_wait_for_ever(start: Start) -> None:
    group = start()
    group.fail_later_on({1: "unseen"})
    began = time.monotonic()
    with pytest.raises(GroupError, match="ValueError: unseen"):
        group.pid()
    assert time.monotonic() - began < SOON


def test_a_call_cut_off_while_it_is_sent_ends_the_group_and_nobody_waits_for_a_rank_without_it(
    pool: RayResourcePool, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = start("actor")
    pids = group.pid()
    send = RayExecutor._start

    def interrupted_at_rank_1(self: RayExecutor, rank: int, *rest: Any) -> list[Any]:
        if rank == 1:
            raise KeyboardInterrupt
        return send(self, rank, *rest)

    monkeypatch.setattr(RayExecutor, "_start", interrupted_at_rank_1)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        group.wait_for_file(str(tmp_path / "never"))
    group.shutdown()
    assert time.monotonic() - began < SOON
    assert not any(map(runs, pids))
    assert pool.tenants == []
    with pytest.raises(GroupBroken, match=r"KeyboardInterrupt while actor\.wait_for_file was being sent: 1 of 2 ranks"):
        group.pid()


@pytest.mark.parametrize("at", ["_start", "_build"])
def test_a_start_that_is_interrupted_leaves_nothing(
    pool: RayResourcePool, start: Start, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    step, begun = getattr(launch, at), []

    def interrupted(*args: Any) -> None:
        begun.append(step(*args))
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, at, interrupted)
    with pytest.raises(KeyboardInterrupt):
        start("actor", detached=True)
    assert begun
    assert pool.tenants == []
    assert list_named_actors(all_namespaces=True) == []


def test_a_late_call_names_the_ranks_and_shows_where_they_stand(start: Start) -> None:
    group = start("actor")
    group.pid()
    with pytest.raises(CallTimeout, match=r"actor.late_on had no answer in 2 s from 1 of 2 ranks, 1:") as caught:
        group.late_on(1)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.role, error.method, error.timeout, error.ranks) == ("actor", "late_on", 2, (1,))
    assert "in block" in error.stacks[1] and "roles.py" in error.stacks[1]
    with pytest.raises(GroupBroken):
        group.pid()


def test_deadlines_are_of_the_call_before_the_method_before_the_group(start: Start) -> None:
    group = start("patient", Plain, timeout=0.3)
    with pytest.raises(CallTimeout) as caught:
        group.patient_on(0)
    assert caught.value.timeout == 0.3
    group = start("quick", Plain)
    with pytest.raises(CallTimeout) as caught:
        group.late_on.options(timeout=0.2)(0)
    assert caught.value.timeout == 0.2


def test_a_constructor_that_raises_is_told_in_seconds_and_leaves_nothing(pool: RayResourcePool, start: Start) -> None:
    with pytest.raises(
        WorkerError, match=r"rank 1 .*failed in __init__: RuntimeError: rank 1 cannot be made"
    ) as caught:
        start("actor", RaisesInInit)
    assert not runs(caught.value.pid)
    assert pool.tenants == []


def test_a_rank_that_dies_before_the_rendezvous_is_told(pool: RayResourcePool, start: Start) -> None:
    with pytest.raises(WorkerDied) as caught:
        start("actor", DiesInInit)
    assert (caught.value.rank, caught.value.method) == (0, "__init__")
    assert pool.tenants == []


def test_an_import_that_fails_on_the_worker_is_told(start: Start) -> None:
    class Local(Plain):
        def __reduce__(self) -> tuple[object, ...]:
            return __import__, ("no_such_module",)

    with pytest.raises(WorkerError) as caught:
        start("actor", Plain, Local())
    assert caught.value.cause == "ModuleNotFoundError: No module named 'no_such_module'"


def test_a_start_past_its_deadline_is_told(start: Start) -> None:
    class NeverReady(Plain):
        def __init__(self) -> None:
            while True:
                time.sleep(0.05)

    with pytest.raises(CallTimeout, match="__init__ had no answer"):
        start("actor", NeverReady, start_timeout=5)


@pytest.mark.parametrize("way", ["shutdown", "with", "garbage"])
def test_however_a_group_ends_nothing_of_it_is_left(pool: RayResourcePool, start: Start, way: str) -> None:
    from mcontroller.ray import RayClassWithInitArgs

    group = RayWorkerGroup(pool, RayClassWithInitArgs(Plain), name_prefix="actor")
    pids = group.pid()
    if way == "shutdown":
        group.shutdown()
        group.shutdown()
    elif way == "with":
        with group:
            pass
    else:
        del group
        gc.collect()
    assert not any(map(runs, pids))
    assert pool.tenants == []


def test_a_group_that_was_shut_down_says_so(start: Start) -> None:
    group = start("actor")
    group.shutdown()
    with pytest.raises(GroupError, match="group actor has been shut down"):
        group.pid()
