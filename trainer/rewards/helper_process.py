"""Processes of the controller that import functions of a program: how they start, and how they end with it."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from mcontroller.errors import ConfigError

START_TIMEOUT_S = 300.0
"""[s] Longest time in which a process starts and imports the functions."""
EXIT_TIMEOUT_S = 1.0
"""[s] Longest time from the end of a process's connection to its exit code."""


@contextlib.contextmanager
def served(descriptor: int) -> Iterator[Connection]:
    """Yield the connection with this file descriptor to the body of a process, which ends with the program."""
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        yield Connection(descriptor)


class HelperProcess:
    """A process on this machine that runs functions of a program for this one.

    It does not import the main module of this program. It is in a new session: Ctrl-C in the terminal ends the program,
    which ends its processes. If this program ends without that, the kernel kills the process and those that it has
    started, whatever they do.

    Args:
        code: what it runs, with the file descriptor of its connection as the argument.

    Attributes:
        process: the process.
        connection: to the process.
    """

    def __init__(self, code: str) -> None:
        self.connection, theirs = Pipe()
        ends, starts = os.pipe()
        self._open = os.fdopen(starts, "wb")
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno())],
                pass_fds=[theirs.fileno(), ends],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                start_new_session=True,
            )
            # The kernel sends the signal when the other end of the pipe is closed, which this process alone has open.
            # It reaches a process whose threads wait for the interpreter, and does not depend on the thread that
            # started it, as PR_SET_PDEATHSIG does.
            fcntl.fcntl(ends, fcntl.F_SETOWN, -self.process.pid)
            fcntl.fcntl(ends, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(ends, fcntl.F_SETFL, os.O_ASYNC)
        finally:
            theirs.close()
            os.close(ends)

    @classmethod
    def start(cls, code: str, first: Any, imports: str, key: str, message_s: float) -> HelperProcess:
        """Start a process, wait until it has imported the functions, and return it.

        Args:
            code: see the class.
            first: the message that it gets. It answers None, or the text of an error.
            imports: what it imports, for error messages.
            key: the configuration key that names it.
            message_s: [s] longest time that a message takes, after which it raises OSError: a process that is blocked
                neither reads one nor completes it.

        Raises:
            ConfigError: the process answers with an error, ends, or does not answer.
        """
        helper, error = cls(code), f"a process did not import {imports} within {START_TIMEOUT_S:g} s"
        try:
            helper.connection.send(first)
            if helper.connection.poll(START_TIMEOUT_S):
                error = helper.connection.recv()
        except (EOFError, OSError):
            error = f"a process ended with exit code {helper.wait()} while it imported {imports}"
        finally:
            if error is not None:
                helper.close()
        if error is not None:
            raise ConfigError(error, key=key)
        with socket.fromfd(helper.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as ours:
            for limit in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", math.ceil(message_s), 0))
        return helper

    def wait(self) -> int:
        """Return the exit code of a process that has closed its connection; it is known a moment later."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_TIMEOUT_S)
        return self.kill()

    def kill(self) -> int:
        """Kill the process and those that it has started, all of one process group, and return its exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._open.close()
        return self.process.wait()

    def close(self) -> int:
        """Kill the process as ``kill`` does, and close the connection to it."""
        code = self.kill()
        self.connection.close()
        return code
