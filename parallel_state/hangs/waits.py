"""What a thread communicates: how long it has waited for other ranks in ``Work.wait``, where it waited long, and bytes.

On gloo and on simulated ranks the wait is on the host. With NCCL it is on the device, and the time here is about 0.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

LONG_NS = 1_000_000
"""[ns] Waits that are longer are kept by themselves."""


class LongWait(NamedTuple):
    """A wait in one collective or transfer.

    Attributes:
        link: ``link_name`` of the ranks that it is between.
        number: of the collective in its group, or of the transfer on its route; the same on all members.
        begin: [ns] by ``time.monotonic_ns``.
        end: as ``begin``.
    """

    link: str
    number: int
    begin: int
    end: int


class _Waited(threading.local):
    def __init__(self) -> None:
        self.nanoseconds = 0
        self.long: deque[LongWait] = deque(maxlen=4096)
        self.nbytes: Counter[str] = Counter()

    def add(self, began: int, link: str, number: int) -> None:
        ended = time.monotonic_ns()
        self.nanoseconds += ended - began
        if ended - began > LONG_NS and link:
            self.long.append(LongWait(link, number, began, ended))


waited = _Waited()
"""What this thread has communicated since it began: ``waited.nanoseconds``, the last waits of over a millisecond in
``waited.long``, and in ``waited.nbytes`` what it passed to the operations of each group, by Megatron's name of it."""


def link_name(description: str, ranks: Sequence[int], *, transfer: bool = False) -> str:
    """Return the name of the link between ranks: of all of a group, or from a sender to a receiver."""
    return f"link {description} {('>' if transfer else ',').join(map(str, ranks))}"
