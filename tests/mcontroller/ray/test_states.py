"""The states of the processes of a group."""

from __future__ import annotations

import pytest

from mcontroller.channel.options import ChannelOptions
from mcontroller.errors import GroupError
from mcontroller.ray.process_handles import GroupState, ProcessHandles

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
