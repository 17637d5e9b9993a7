"""The identity of this machine."""

from __future__ import annotations

import socket
from functools import cache
from pathlib import Path


@cache
def boot_id() -> str:
    """Return what all processes with the same monotonic clock have in common: the boot of their machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def machine_id() -> str:
    """Return what tells this machine, or container, from all others.

    Host names are not unique on some clusters, and containers share the boot of their machine.
    """
    return f"{socket.gethostname()} {boot_id()}"
