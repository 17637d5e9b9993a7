"""The matching of calls: a collective by its number on its group, a transfer by source, destination and tag.

Pure bookkeeping without threads. ``match`` returns the calls that a further call completes, and raises if calls do not
fit together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import torch

from parallel_state.simulated.calls import Call, SharedGroup
from parallel_state.simulated.collectives import clones, compute, contradiction, mismatch, transfer
from parallel_state.simulated.errors import AsyncAccessError, CollectiveMismatch, SimulationError
from parallel_state.simulated.order import CollectiveOrder

_Route = tuple[SharedGroup, int | None, int | None, int]


class Exchange:
    """The calls that wait for others.

    Args:
        describe: returns the name of a rank in messages.
        check_async: whether to find tensors that change between an asynchronous call and its wait.

    Attributes:
        devices: types of the devices whose tensors can be exchanged.
    """

    devices: ClassVar[tuple[str, ...]] = ("cpu",)

    def __init__(self, describe: Callable[[int], str], check_async: bool = True) -> None:
        self._describe = describe
        self._check_async = check_async
        self._collectives: dict[tuple[SharedGroup, int], dict[int, Call]] = {}
        self._sends: dict[_Route, list[Call]] = {}
        self._receives: dict[_Route, list[Call]] = {}
        self._order = CollectiveOrder(describe)

    def match(self, call: Call) -> list[Call]:
        """Match a call, compute what it completes, and return the completed calls.

        Raises:
            CollectiveMismatch: the call does not fit to those of other ranks.
            GroupOrderError: ranks called collectives of several groups in different orders.
            AsyncAccessError: a tensor of a completed call has changed since the call.
        """
        if call.is_async and self._check_async:
            call.guarded = clones([*call.inputs, *call.outputs])
        completed = self._transfer(call) if call.is_transfer else self._collective(call)
        for finished in completed:
            finished.done = True
            if finished.guarded:
                finished.guarded = clones([*finished.inputs, *finished.outputs])
        return completed

    def check_unchanged(self, call: Call) -> None:
        """Raise AsyncAccessError if a tensor of an asynchronous call has changed since the call."""
        tensors = (*call.inputs, *call.outputs)
        if call.guarded and not all(map(_equal_values, tensors, call.guarded)):
            raise AsyncAccessError(
                f"a tensor changed between an asynchronous call and its wait\n\n{self.story(call)}\n    wait for the "
                "call before the tensor is used again",
                ranks=(call.rank,),
            )

    def missing(self, call: Call) -> list[int]:
        """Return the ranks that a call waits for."""
        if call.is_transfer:
            return [call.peer] if call.peer is not None else [rank for rank in call.group.ranks if rank != call.rank]
        present = self._collectives.get((call.group, call.number), {})
        return [call.group.ranks[index] for index in self.members(call) if index not in present]

    def members(self, call: Call) -> Sequence[int]:
        """Return the members that take part in a collective, by their ranks in the group."""
        return range(len(call.group.ranks))

    def runs(self, rank: int) -> bool:
        """Whether a rank runs; a transfer with one that does not is complete at once."""
        return True

    def compute(self, calls: Sequence[Call]) -> None:
        """Compute a collective from the calls of its members."""
        compute(calls)

    def transfer(self, send: Call, receive: Call) -> None:
        """Copy what one rank sends into the tensor of the rank that receives it."""
        transfer(send, receive)

    def pending(self) -> list[Call]:
        """Return the calls that are not complete, of each collective that of its first member."""
        transfers = [call for waiting in (*self._sends.values(), *self._receives.values()) for call in waiting]
        return [next(iter(meeting.values())) for meeting in self._collectives.values()] + transfers

    def story(self, call: Call) -> str:
        """Return a rank, its call and its line, as messages show them."""
        return f"{self._describe(call.rank)}: {call}\n    at {call.line}"

    def _collective(self, call: Call) -> list[Call]:
        reason = contradiction(call)
        if reason is not None:
            raise self._mismatch(f"the tensors of one call do not fit together: {reason}", [call])
        meeting = self._collectives.setdefault((call.group, call.number), {})
        for other in meeting.values() if call.operation.startswith("all_to_all") else list(meeting.values())[:1]:
            reason = mismatch(other, call)
            if reason is not None:
                raise self._mismatch(reason, [other, call])
        meeting[call.index] = call
        self._order.add(call)
        members = self.members(call)
        if len(meeting) < len(members):
            return []
        del self._collectives[call.group, call.number]
        calls = [meeting[index] for index in members]
        for member in calls:
            self.check_unchanged(member)
        self._order.complete(call)
        self.compute(calls)
        return calls

    def _transfer(self, call: Call) -> list[Call]:
        if call.peer is not None and not self.runs(call.peer):
            return [call]
        tag = call.options.get("tag", 0)
        sends = call.operation == "send"
        mine, others = (self._sends, self._receives) if sends else (self._receives, self._sends)
        source, destination = (call.rank, call.peer) if sends else (call.peer, call.rank)
        for route in _routes(call, source, destination, tag):
            waiting = others.get(route)
            if waiting:
                other = waiting.pop(0)
                if not waiting:
                    del others[route]
                break
        else:
            mine.setdefault((call.group, source, destination, tag), []).append(call)
            return []
        sending, receiving = (call, other) if sends else (other, call)
        if sending.key != receiving.key:
            raise self._mismatch("what is sent is not what is received", [sending, receiving])
        self.check_unchanged(sending)
        self.check_unchanged(receiving)
        self.transfer(sending, receiving)
        receiving.peer = sending.rank
        return [sending, receiving]

    def _mismatch(self, reason: str, calls: list[Call]) -> SimulationError:
        stories = "\n".join(map(self.story, calls))
        return CollectiveMismatch(f"{reason}\n\n{stories}", ranks=tuple(call.rank for call in calls))


def _routes(call: Call, source: int | None, destination: int | None, tag: int) -> Iterable[_Route]:
    """Return the routes on which the other side of a transfer may wait: a receive may be from any rank."""
    if call.operation == "send":
        return [(call.group, source, destination, tag), (call.group, None, destination, tag)]
    sources = [source] if source is not None else call.group.ranks
    return [(call.group, sender, destination, tag) for sender in sources]


def _equal_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape have the same values, NaN included."""
    a, b = one.detach(), other.detach()
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
