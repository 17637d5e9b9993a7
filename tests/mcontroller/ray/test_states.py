"""The states of the processes of a group."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mcontroller.channel.options import ChannelOptions
from mcontroller.errors import GroupError
from mcontroller.ray import process_handles
from mcontroller.ray.calls.executor import RayExecutor
from mcontroller.ray.calls.supervision import GroupProcesses
from mcontroller.ray.process_handles import GroupState, ProcessHandles

SESSION = ("node", "job")
FIRST, SECOND = GroupError("first"), GroupError("second")


@pytest.fixture
def handles() -> ProcessHandles:
    return ProcessHandles(lambda: None, ChannelOptions())


def test_the_first_failure_stays_the_cause(handles: ProcessHandles) -> None:
    handles.enter(GroupState.BROKEN, FIRST)
    handles.enter(GroupState.BROKEN, SECOND)
    handles.end()
    assert handles.state is GroupState.BROKEN and handles.cause is FIRST
    handles.enter(GroupState.RESTARTING)
    handles.enter(GroupState.BROKEN, SECOND)  # the restart failed
    assert handles.state is GroupState.BROKEN and handles.cause is FIRST


def test_a_group_that_was_ended_does_not_break(handles: ProcessHandles) -> None:
    handles.enter(GroupState.READY)
    handles.end()
    handles.enter(GroupState.BROKEN, FIRST)
    assert handles.state is GroupState.ENDED and handles.cause is None


def test_only_a_broken_group_restarts(handles: ProcessHandles) -> None:
    handles.enter(GroupState.READY)
    handles.enter(GroupState.RESTARTING)
    assert handles.state is GroupState.READY


def test_a_restarted_group_knows_why_values_of_earlier_processes_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_handles, "session", lambda: SESSION)
    monkeypatch.setattr(ProcessHandles, "_kill", lambda handles: [])

    def failing(*_: object) -> GroupProcesses:
        raise SECOND

    groups = []
    for name in ("first", "second", "third"):
        actor = SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda name=name: name))
        handles = ProcessHandles(lambda: None, ChannelOptions(), actors=[actor], _session=SESSION)
        handles.enter(GroupState.READY)
        groups.append(GroupProcesses("group", handles))
    first, second, third = groups
    first.launch_again, second.launch_again = lambda *_: second, failing
    executor = RayExecutor(first, "role")
    executor.fail(FIRST)
    executor.restart()
    assert executor.processes is second and executor.broken is None
    assert first.state is GroupState.ENDED
    with pytest.raises(GroupError):
        executor.restart()  # of a group that works
    assert executor.broken is SECOND
    second.launch_again = lambda *_: third
    executor.restart()
    assert executor.processes is third and third.state is GroupState.READY
    assert third.error_for("first") is FIRST
    assert isinstance(third.error_for("second"), GroupError)
    third.handles.end()
