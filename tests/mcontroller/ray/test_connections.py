"""Connections that are lost while their processes live."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mcontroller.errors import ConnectionLost, DataError, GroupBroken
from mcontroller.ray import RayWorkerGroup
from mcontroller.ray.calls import supervision
from mcontroller.ray.calls.executor import RayExecutor
from mcontroller.ray.calls.supervision import GroupCall, GroupProcesses
from mcontroller.transport import Arguments
from tests.mcontroller.channel.endpoints import cut_local_connections
from tests.mcontroller.channel.network import Network
from tests.mcontroller.ray.roles import Numbered, Plain

Start = Callable[..., RayWorkerGroup]


@pytest.fixture
def networks() -> Iterator[list[Network]]:
    networks: list[Network] = []
    yield networks
    for network in networks:
        network.end()


def through(networks: list[Network], group: RayWorkerGroup) -> RayExecutor:
    """Another controller of the group's processes.

    It reaches the calls of rank r through ``networks[2 * r]``, and its queries through the next.
    """
    handles = group.executor.processes.handles
    infos = []
    for info in handles.infos:
        there = info.address
        calls, queries = (Network(there.host, port) for port in (there.call_port, there.query_port))
        networks += [calls, queries]
        address = replace(there, host="127.0.0.1", call_port=calls.port, query_port=queries.port, folder="")
        infos.append(replace(info, address=address))
    return RayExecutor(GroupProcesses("plain", replace(handles, infos=infos), detached=True), "plain")


def call(executor: RayExecutor, method: str, *args: object) -> list[object]:
    arguments = Arguments(args)
    return executor.submit(method, {0: arguments, 1: arguments}, (0, 1), timeout=60).result()


def test_a_call_goes_on_after_its_connection_is_restored_and_runs_once(start: Start, networks: list[Network]) -> None:
    executor = through(networks, start("plain", Numbered))
    assert call(executor, "number") == [1, 1]
    for number in range(2, 5):
        running = executor.submit("number", dict.fromkeys((0, 1), Arguments()), (0, 1), timeout=60)
        networks[0].cut()
        assert running.result() == [number, number]


def test_calls_go_on_after_local_connections_are_lost_and_run_once(start: Start) -> None:
    group = start("plain", Numbered)
    executor = group.executor
    assert call(executor, "number") == [1, 1]
    running = [executor.submit("number", dict.fromkeys((0, 1), Arguments()), (0, 1), timeout=60) for _ in range(20)]
    for info in executor.processes.handles.infos:
        cut_local_connections(info.address)
    assert [future.result() for future in running] == [[number, number] for number in range(2, 22)]
    assert call(executor, "number") == [22, 22]


@pytest.mark.parametrize("detached", [False, True])
def test_a_lost_call_runs_before_one_sent_while_the_connection_was_lost(
    start: Start, networks: list[Network], detached: bool
) -> None:
    executor = through(networks, start("plain", Numbered))
    executor.processes.detached = detached
    assert call(executor, "number") == [1, 1]

    def submit() -> GroupCall:
        return executor.submit("number", dict.fromkeys((0, 1), Arguments()), (0, 1), timeout=60)

    for number in (2, 4, 6):
        calls = [networks[0].lose_while(submit), submit()]
        assert [future.result() for future in calls] == [[number, number], [number + 1, number + 1]]


@pytest.mark.parametrize("waiting", [True, False])
def test_a_process_that_cannot_be_reached_is_told_apart_from_one_that_died(
    start: Start, networks: list[Network], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waiting: bool
) -> None:
    monkeypatch.setattr(supervision, "RECONNECT_SECONDS", 0.5)
    group = start("plain", Plain)
    executor = through(networks, group)
    pids = call(executor, "pid")
    for network in networks[2:]:
        network.end()
    method = "wait_for_file" if waiting else "no call"
    while not waiting and executor.broken is None:
        time.sleep(0.01)
    with pytest.raises(ConnectionLost) as lost:
        call(executor, "wait_for_file", str(tmp_path / "never"))
    assert (lost.value.rank, lost.value.pid, lost.value.method) == (1, pids[1], method)
    with pytest.raises(GroupBroken):
        call(executor, "pid")


def test_a_result_of_a_class_that_the_controller_cannot_import_is_a_data_error(steady: RayWorkerGroup) -> None:
    with pytest.raises(DataError):
        steady.of_a_class_of_its_own()
    assert len(set(steady.pid())) == 4
