"""The time that a thread has waited for other ranks, in ``Work.wait`` of collectives and transfers.

On gloo and on simulated ranks the wait is on the host. With NCCL it is on the device, and the time here is about 0.
"""

from __future__ import annotations

import threading

__all__ = ["waited"]


class _Waited(threading.local):
    nanoseconds = 0


waited = _Waited()
"""``waited.nanoseconds`` is the time of this thread since it began."""
