"""Reserve a TCP port, of a range if one is set, until a library binds to it."""

from __future__ import annotations

import errno
import random
import socket


def reserve_port(host: str, ports: tuple[int, int] | None) -> socket.socket:
    """Return a socket that holds a free port, which it never listens on.

    The port is taken without SO_REUSEADDR, so that no other process holds it, and the option is set afterwards: ZeroMQ
    and torch's store, which set it too, can bind to the port while the socket holds it. The kernel does not assign the
    port to a process that asks for any free one, and no other reservation gets it.

    Args:
        host: an address of this machine; empty for all of them.
        ports: the first and the last port that may be taken; None for any.

    Raises:
        OSError: no port of the range is free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    first, last = ports or (0, 0)
    candidates = list(range(first, last + 1))
    start = random.randrange(len(candidates))  # the processes of a node begin at different ports
    for port in candidates[start:] + candidates[:start]:
        reserved = socket.socket(family, socket.SOCK_STREAM)
        try:
            reserved.bind((host, port))
        except OSError as error:
            reserved.close()
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return reserved
    raise OSError(
        f"no free port from {first} to {last} on {host or 'this node'} for a worker process: allow more ports"
    )
