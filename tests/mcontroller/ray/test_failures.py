from __future__ import annotations

import gc
import itertools
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import list_named_actors

from mcontroller.channel.controller import Hub
from mcontroller.errors import CallTimeout, ConfigError, GroupBroken, GroupError, ResourceError, WorkerDied, WorkerError
from mcontroller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, launch
from mcontroller.ray.calls import failures, supervision
from mcontroller.ray.calls.failures import LOG_BYTES, RankFailure, RankLabel, first_cause, is_follower
from parallel_state import ParallelLayout
from tests.mcontroller.ray.roles import DiesInInit, Numbered, Plain, RaisesInInit, Reporting

Start = Callable[..., RayWorkerGroup]

SOON = 10
"""Seconds that a machine under load may take for what takes a fraction of one; no test waits for a deadline."""


@pytest.fixture
def lasting_pool(ray_cluster: None) -> Iterator[RayResourcePool]:
    with RayResourcePool([2], use_gpu=False, name_prefix="lasting", detached=True) as pool:
        yield pool


def runs(pid: int) -> bool:
    """Whether a process has not ended; its parent may still have to take note of that."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_an_exception_arrives_at_once_and_names_rank_node_and_pid(start: Start) -> None:
    group = start("actor")
    pids = group.pid()
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        group.fail_on({1: "no such thing"})
    assert time.monotonic() - began < SOON
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.role, error.rank, error.method, error.pid) == ("actor", 1, "fail_on", pids[1])
    assert error.node == group.executor.nodes[1]
    assert error.coordinates == {}
    assert error.cause == "ValueError: no such thing"
    assert "raise ValueError(causes[self.rank])" in error.worker_traceback
    assert "process.py" not in error.worker_traceback
    assert error.followers == 0


def test_errors_contain_coordinates_once_they_are_known(start: Start) -> None:
    group = start("actor")
    group.executor.set_coordinates([{"tp": 0, "pp": 0}, {"tp": 1, "pp": 0}])
    with pytest.raises(WorkerError) as caught:
        group.fail_on({1: "x"})
    assert caught.value.coordinates == {"tp": 1, "pp": 0}


def test_a_worker_reports_its_coordinates_before_the_group_has_asked_for_them(start: Start) -> None:
    group = start("actor", Reporting, ParallelLayout(2, tp=2))
    with pytest.raises(WorkerError) as caught:
        group.fail_on(1)
    assert caught.value.coordinates == {"tp": 1, "cp": 0, "dp": 0, "pp": 0}


def test_the_cause_comes_first_and_its_followers_are_counted(start: Start) -> None:
    group = start()
    with pytest.raises(WorkerError) as caught:
        group.fail_on({0: "recv: Connection closed by peer [10.0.0.1]", 1: "out of memory"})
    assert (caught.value.rank, caught.value.cause, caught.value.followers) == (1, "ValueError: out of memory", 1)


def test_errors_after_the_loss_of_a_peer_are_recognised() -> None:
    assert is_follower("RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242")
    assert is_follower("DistBackendError: NCCL error: remote process exited or there was a network error")
    assert not is_follower("ValueError: the batch has no column 'values'")


@pytest.mark.parametrize(
    ("how", "cause"),
    [("exit", "exited with code 3"), ("kill", "killed by SIGKILL"), ("segfault", "killed by SIGSEGV")],
)
def test_the_error_of_a_dead_process_has_how_it_ended_and_its_last_lines(start: Start, how: str, cause: str) -> None:
    group = start("critic")
    pids = group.pid()
    began = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        group.die_on(1, how)
    assert time.monotonic() - began < SOON
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.role, error.rank, error.pid, error.method) == ("critic", 1, pids[1], "die_on")
    assert len(error.log_tail) <= 2 * LOG_BYTES  # standard output and standard error
    assert error.exit_cause.startswith(cause) and "connection error" not in error.exit_cause
    assert "the last words of a rank" in error.log_tail


@pytest.mark.parametrize(("blocks", "files", "full"), [(0, 9, True), (1 << 20, 0, True), (1 << 20, 9, False)])
def test_a_full_file_system_of_rays_folder_is_named_beside_the_log(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, files: int, full: bool
) -> None:
    log = tmp_path / "worker.out"
    log.write_text("the last words\n")
    status = os.statvfs_result((4096, 4096, 1 << 20, blocks, blocks, 9, files, files, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: status)
    texts = [failures._read_tail([str(log)]), failures.tail(None)]
    assert texts[0].startswith("the last words")
    line = f"is full: {4096 * blocks} bytes and {files} files are left"
    assert [line in text for text in texts] == [full, full]
    assert (str(log) in texts[0]) is full


def test_an_exception_without_a_text_is_reported_with_its_type_and_traceback(start: Start) -> None:
    with pytest.raises(WorkerError) as caught:
        start().execute_all_sync("fail_without_text")
    assert caught.value.cause == "Mute: (RuntimeError in its __str__)"
    assert "raise Mute" in caught.value.worker_traceback


def test_a_method_that_exits_the_interpreter_is_reported_as_its_failure(start: Start) -> None:
    with pytest.raises(WorkerError) as caught:
        start().die_on(0, "sys.exit")
    assert caught.value.cause == "SystemExit: 3"


def test_the_first_failure_stops_the_peers_and_later_calls_raise_its_cause(pool: RayResourcePool, start: Start) -> None:
    group = start("actor")
    pids = group.pid()
    with pytest.raises(WorkerError) as first:
        group.fail_on({0: "boom"})
    assert not any(map(runs, pids))
    with pytest.raises(GroupBroken) as later:
        group.pid()
    assert later.value.first_cause is first.value
    assert pool.holders == []


def test_a_failure_that_was_not_waited_for_breaks_the_next_call(start: Start) -> None:
    group = start()
    future = group.fail_later_on({1: "unseen"})
    assert future.wait(60)
    with pytest.raises(GroupBroken) as caught:
        group.pid()
    for _ in range(2):  # get raises the error of the call, although the wait has seen it first
        with pytest.raises(WorkerError) as first:
            future.get()
        assert first.value is caught.value.first_cause


def test_a_deadline_that_passes_during_a_wait_is_raised_by_the_result(start: Start) -> None:
    future = start("quick", Plain).late_on.options(blocking=False, timeout=0.2)(0)
    assert future.wait(60)
    with pytest.raises(CallTimeout) as caught:
        future.get()
    assert (caught.value.method, caught.value.timeout) == ("late_on", 0.2)


def test_a_call_behind_a_failed_one_does_not_wait_for_ever(start: Start) -> None:
    group = start()
    group.fail_later_on({1: "unseen"})
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        group.pid()
    assert caught.value.cause == "ValueError: unseen"
    assert time.monotonic() - began < SOON


def test_a_call_interrupted_while_it_is_sent_ends_the_group_and_all_waits(
    pool: RayResourcePool, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = start("actor")
    pids = group.pid()
    send = Hub.send

    def interrupted_at_rank_1(self: Hub, messages: Iterable[Any]) -> None:
        send(self, itertools.islice(messages, 1))
        raise KeyboardInterrupt

    monkeypatch.setattr(Hub, "send", interrupted_at_rank_1)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        group.wait_for_file(str(tmp_path / "never"))
    group.shutdown()
    assert time.monotonic() - began < SOON
    assert not any(map(runs, pids))
    assert pool.holders == []
    with pytest.raises(GroupBroken) as caught:
        group.pid()
    assert "1 of 2 ranks" in str(caught.value.first_cause)


def test_an_end_that_is_interrupted_is_completed_by_the_next(
    pool: RayResourcePool, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = start("actor")
    pids = group.pid()
    kill, killed = ray.kill, []

    def interrupted_at_rank_1(handle: Any) -> None:
        killed.append(handle)
        if len(killed) == 2:
            raise KeyboardInterrupt
        kill(handle)

    monkeypatch.setattr(ray, "kill", interrupted_at_rank_1)
    with pytest.raises(KeyboardInterrupt):
        group.shutdown()
    group.shutdown()
    assert not any(map(runs, pids))
    assert pool.holders == []


def test_a_detached_group_whose_class_cannot_travel_takes_no_slot(lasting_pool: RayResourcePool) -> None:
    class Locked(Plain):
        lock = threading.Lock()

    with pytest.raises(ConfigError) as caught:
        RayWorkerGroup(lasting_pool, RayClassWithInitArgs(Locked), detached=True)
    assert caught.value.value is Locked
    assert lasting_pool.holders == []


def test_a_detached_group_is_rejected_on_a_pool_that_ends_with_its_driver(pool: RayResourcePool, start: Start) -> None:
    with pytest.raises(ResourceError) as caught:
        start("actor", detached=True)
    assert caught.value.fields == {"name": "actor", "pool": "two"}
    assert pool.holders == []


def test_calls_of_several_threads_reach_all_ranks_in_one_order(start: Start) -> None:
    group, sent = start("actor", Numbered), []

    def send() -> None:
        for _ in range(100):
            sent.append(group.number.options(blocking=False)())

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(before)
    numbers = [future.get() for future in sent]
    assert [first for first, _ in numbers] == [second for _, second in numbers]
    assert len(numbers) == 400


def test_calls_behind_an_open_one_are_sent_without_looking_at_each_of_them(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = start("actor")
    group.wait_for_file(str(tmp_path / "go"))
    wait, looked_at = ray.wait, []

    def counting(refs: list[Any], **options: Any) -> Any:
        looked_at.append(len(refs))
        return wait(refs, **options)

    monkeypatch.setattr(ray, "wait", counting)
    futures = [group.later(number) for number in range(200)]
    (tmp_path / "go").touch()
    assert futures[-1].get() == [(0, 199), (1, 199)]
    assert sum(looked_at) < 10 * len(futures)
    assert [future.get()[1][1] for future in futures] == list(range(200))


@pytest.mark.parametrize("at", ["_start", "_build"])
def test_a_start_that_is_interrupted_leaves_nothing(
    lasting_pool: RayResourcePool, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    step, begun = getattr(launch, at), []

    def interrupted(*args: Any) -> None:
        begun.append(step(*args))
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, at, interrupted)
    with pytest.raises(KeyboardInterrupt):
        RayWorkerGroup(lasting_pool, RayClassWithInitArgs(Plain), detached=True)
    assert begun
    assert lasting_pool.holders == []
    assert list_named_actors(all_namespaces=True) == []


def test_a_late_call_names_the_ranks_and_shows_their_stacks(start: Start) -> None:
    group = start("actor")
    group.pid()
    with pytest.raises(CallTimeout) as caught:
        group.late_on(1)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.role, error.method, error.timeout, error.ranks) == ("actor", "late_on", 2, (1,))
    assert "in block" in error.stacks[1] and "roles.py" in error.stacks[1]
    with pytest.raises(GroupBroken):
        group.pid()


def test_a_rank_in_native_code_is_reported_as_such(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "QUERY_SECONDS", 1.0)  # it never answers
    group = start("actor")
    with pytest.raises(CallTimeout) as caught:
        group.hold_the_interpreter_on(1)
    assert "is in native code" in caught.value.stacks[1]


def test_a_stopped_rank_is_reported_and_ended_before_its_slot_is_free(
    pool: RayResourcePool, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "QUERY_SECONDS", 1.0)  # it never answers
    group = start("actor")
    pids = group.pid()
    with pytest.raises(CallTimeout) as caught:
        group.stop_on(1)
    assert "the process is stopped" in caught.value.stacks[1]
    assert "holds the interpreter" not in caught.value.stacks[1]
    assert not any(map(runs, pids))
    assert pool.holders == []


def test_deadlines_are_of_the_call_before_the_method_before_the_group(start: Start) -> None:
    group = start("patient", Plain, timeout=0.3)
    with pytest.raises(CallTimeout) as caught:
        group.patient_on(0)
    assert caught.value.timeout == 0.3
    group = start("quick", Plain)
    with pytest.raises(CallTimeout) as caught:
        group.late_on.options(timeout=0.2)(0)
    assert caught.value.timeout == 0.2


def test_a_constructor_that_raises_is_reported_in_seconds_and_leaves_nothing(
    pool: RayResourcePool, start: Start
) -> None:
    with pytest.raises(WorkerError) as caught:
        start("actor", RaisesInInit)
    assert (caught.value.rank, caught.value.method) == (1, "__init__")
    assert not runs(caught.value.pid)
    assert pool.holders == []


def test_a_rank_that_dies_before_the_rendezvous_is_reported(pool: RayResourcePool, start: Start) -> None:
    with pytest.raises(WorkerDied) as caught:
        start("actor", DiesInInit)
    assert (caught.value.rank, caught.value.method) == (0, "__init__")
    assert pool.holders == []


def test_a_process_that_the_memory_monitor_of_ray_kills_has_died_and_its_node_is_known(ray_cluster: None) -> None:
    text = "1 worker(s) were killed due to the node running low on memory. 60 GB of 62 GB\nTop 10 memory users: ..."
    label = RankLabel("actor", 3, {}, None, "10.0.0.7")  # in its start: it has not reported yet
    died = first_cause([RankFailure(label, "__init__", ray.exceptions.OutOfMemoryError(text))])
    assert isinstance(died, WorkerDied) and (died.rank, died.node) == (3, "10.0.0.7")
    assert "60 GB of 62 GB" in died.exit_cause


def test_an_import_that_fails_on_the_worker_is_reported(start: Start) -> None:
    class Local(Plain):
        def __reduce__(self) -> tuple[object, ...]:
            return __import__, ("no_such_module",)

    with pytest.raises(WorkerError) as caught:
        start("actor", Plain, Local())
    assert caught.value.cause == "ModuleNotFoundError: No module named 'no_such_module'"


def test_a_start_past_its_deadline_is_reported(start: Start) -> None:
    class NeverReady(Plain):
        def __init__(self) -> None:
            while True:
                time.sleep(0.05)

    with pytest.raises(CallTimeout) as caught:
        start("actor", NeverReady, start_timeout=5)
    assert caught.value.method == "__init__"


@pytest.mark.parametrize("way", ["shutdown", "with", "garbage"])
def test_however_a_group_ends_nothing_of_it_is_left(pool: RayResourcePool, start: Start, way: str) -> None:
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
    assert pool.holders == []


def test_a_call_of_a_group_that_was_shut_down_raises(start: Start) -> None:
    group = start("actor")
    group.shutdown()
    with pytest.raises(GroupError):
        group.pid()


def test_a_call_after_the_shutdown_of_ray_raises_and_starts_no_other_ray(ray_cluster: None) -> None:
    """In a separate process, as the tests share one connection."""
    command = [sys.executable, "-c", AFTER_RAY, ray.get_runtime_context().gcs_address]
    answers = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert answers.stdout.splitlines() == [
        "group old has been shut down, together with the Ray cluster that it ran on: start it again to call it",
        "group old was shut down before later was complete, or before its result was read",
        "False",
        "[7] ['new']",
    ], answers.stderr


AFTER_RAY = """
import sys
import ray
from mcontroller.errors import GroupError
from mcontroller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from tests.mcontroller.ray.roles import Plain
ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False)
pool = RayResourcePool([1], use_gpu=False, warm_start=False)
old = RayWorkerGroup(pool, RayClassWithInitArgs(Plain, 7), name_prefix="old")
future = old.later(1)
ray.shutdown()
for ask in (old.get, future.get):
    try:
        ask()
    except GroupError as error:
        print(error)
print(ray.is_initialized())
options = dict(num_cpus=1, object_store_memory=80_000_000, include_dashboard=False, logging_level="ERROR")
ray.init(address="local", **options)
with RayWorkerGroup(pool, RayClassWithInitArgs(Plain, 7), name_prefix="new") as new:
    old.shutdown()
    print(new.get(), pool.holders)
ray.shutdown()
"""
