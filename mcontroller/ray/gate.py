"""Which of the calls that a process was sent begin: all of them, but for those that are taken back in time.

A call goes to several ranks and is run by all of them or by none, so whoever takes it back first has every rank hold
it, and then decides for all alike.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

__all__ = ["Gate", "Ticket"]


class Ticket(NamedTuple):
    """Names one call of one controller; its numbers grow."""

    caller: str
    number: int


class Gate:
    """What calls pass on the way to their method. Questions about a call may overtake the call and one another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)
        self._begun: dict[str, int] = {}
        self._held: set[Ticket] = set()
        self._decided: dict[Ticket, bool] = {}

    def begin(self, ticket: Ticket) -> bool:
        """Whether the call is to be run; waits while it is held."""
        with self._lock:
            while ticket in self._held:
                self._turn.wait()
            self._begun[ticket.caller] = ticket.number
            return not self._decided.pop(ticket, False)

    def hold(self, caller: str, number: int) -> bool:
        """Keeps a call from beginning until ``decide``; False where it has begun, or has been decided already."""
        ticket = Ticket(caller, number)
        with self._lock:
            waits = not self._has_begun(ticket) and ticket not in self._decided
            if waits:
                self._held.add(ticket)
            return waits

    def decide(self, caller: str, number: int, withdraw: bool) -> None:
        """Lets a call that is held begin, or has it never begin."""
        ticket = Ticket(caller, number)
        with self._lock:
            if not self._has_begun(ticket):
                self._decided[ticket] = withdraw
            self._held.discard(ticket)
            self._turn.notify_all()

    def _has_begun(self, ticket: Ticket) -> bool:
        return ticket.number <= self._begun.get(ticket.caller, -1)
