"""How long a thread has waited for other ranks in ``Work.wait``, and where it waited long.

On gloo and on simulated ranks the wait is on the host. With NCCL it is on the device, and the time here is about 0.
"""

from __future__ import annotations

import threading
import time
from collections import deque
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

    def add(self, began: int, link: str, number: int) -> None:
        ended = time.monotonic_ns()
        self.nanoseconds += ended - began
        if ended - began > LONG_NS and link:
            self.long.append(LongWait(link, number, began, ended))


waited = _Waited()
"""The waits of this thread: ``waited.nanoseconds`` since it began, and the last of over a millisecond in
``waited.long``."""


def link_name(description: str, ranks: Sequence[int], *, transfer: bool = False) -> str:
    """Return the name of the link between ranks: of all of a group, or from a sender to a receiver."""
    return f"link {description} {('>' if transfer else ',').join(map(str, ranks))}"
