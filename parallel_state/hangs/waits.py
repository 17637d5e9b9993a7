"""How long a thread has waited for other ranks in ``Work.wait``.

On gloo and on simulated ranks the wait is on the host. With NCCL it is on the device, and the time here is about 0.
"""

from __future__ import annotations

import threading


class _Waited(threading.local):
    nanoseconds = 0


waited = _Waited()
"""The waits of this thread: ``waited.nanoseconds`` since it began."""
