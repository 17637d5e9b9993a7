"""The states of a call and of a group, and which may follow which."""

from __future__ import annotations

import enum

__all__ = ["CALL_TRANSITIONS", "GROUP_TRANSITIONS", "CallState", "GroupState"]


class CallState(enum.Enum):
    """The state of a call, as far as the controller knows it."""

    SENT = "sent"
    """No rank is known to have started it."""
    RUNNING = "running"
    """A rank has answered, or has started it for certain."""
    ANSWERED = "answered"
    """Every rank has answered, with a value."""
    FAILED = "failed"
    """A rank has answered with an error; if every rank has rejected it, the group is usable."""
    CANCELLED = "cancelled"
    """Its caller has cancelled it: all ranks run it or none, and its values are dropped."""


CALL_TRANSITIONS = {
    CallState.SENT: {CallState.RUNNING, CallState.CANCELLED},
    CallState.RUNNING: {CallState.ANSWERED, CallState.FAILED, CallState.CANCELLED},
    CallState.ANSWERED: set[CallState](),
    CallState.FAILED: set[CallState](),
    CallState.CANCELLED: {CallState.FAILED},
}


class GroupState(enum.Enum):
    """The state of the processes of a group."""

    STARTING = "starting"
    """The workers are being constructed."""
    READY = "ready"
    """No call of this controller is in flight."""
    BUSY = "busy"
    """Calls of this controller are in flight."""
    BROKEN = "broken"
    """A call failed, and its processes were ended; the group knows the first cause. A restart starts others."""
    ENDED = "ended"
    """The processes were ended on purpose, or the Ray cluster is gone."""


GROUP_TRANSITIONS = {
    GroupState.STARTING: {GroupState.READY, GroupState.BROKEN, GroupState.ENDED},
    GroupState.READY: {GroupState.BUSY, GroupState.BROKEN, GroupState.ENDED},
    GroupState.BUSY: {GroupState.READY, GroupState.BROKEN, GroupState.ENDED},
    GroupState.BROKEN: {GroupState.ENDED},
    GroupState.ENDED: set[GroupState](),
}
