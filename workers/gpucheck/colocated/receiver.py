"""A process that shares the GPU, and receives weights.

``python -m workers.gpucheck.colocated.receiver DEVICE DESCRIPTOR`` is its program. It answers the calls that arrive at
the other end of a pipe.
"""

from __future__ import annotations

import subprocess
import sys
from multiprocessing.connection import Connection, Pipe
from typing import Any, Self

import torch

from mcontroller.errors import ResourceError
from workers.gpucheck.course import Case
from workers.gpucheck.policy import Policy
from workers.gpucheck.session import Session

__all__ = ["CASE", "TIMEOUT_S", "ReceivingProcess", "call"]

CASE = Case("dense", "bfloat16")
"""The model of both processes."""

TIMEOUT_S = 120.0


def call(policy: Policy, method: str, *arguments: Any) -> Any:
    """Call a method of a policy's worker as a group does."""
    with policy.worker.call_context(method):
        return getattr(policy.worker, method)(*arguments)


class ReceivingProcess:
    """The process that receives, with a policy of other weights; a context manager that ends it.

    Args:
        session: has the device, and the folder of the log.
    """

    def __init__(self, session: Session) -> None:
        self._connection, theirs = Pipe()
        self._log = session.folder / "transfer.log"
        with self._log.open("wb") as log:
            program = [sys.executable, "-m", "workers.gpucheck.colocated.receiver"]
            self._process = subprocess.Popen(
                [*program, session.device.type, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
        self._connection.close()

    def start(self, method: str, *arguments: Any) -> None:
        """Start a call there."""
        self._connection.send((method, arguments))

    def result(self) -> Any:
        """Return the result of the call that was started.

        Raises:
            ResourceError: the process ended, or did not answer in time.
        """
        try:
            if self._connection.poll(2 * TIMEOUT_S):
                return self._connection.recv()
            ending = f"did not answer in {2 * TIMEOUT_S:g} s"
        except EOFError:
            ending = f"ended with status {self._process.wait()}"
        lines = self._log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
        raise ResourceError(f"transfer: the process that receives {ending}: {lines[-1]}", log=lines)

    def call(self, method: str, *arguments: Any) -> Any:
        """Return the result of a call there."""
        self.start(method, *arguments)
        return self.result()

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()


def _serve(device_type: str, calls: Connection) -> None:
    """Answer calls to a policy of other weights until this process is killed."""
    if device_type == "cuda":
        torch.cuda.set_device(0)
    with CASE.policy(seed=7) as policy:
        while True:
            method, arguments = calls.recv()
            calls.send(call(policy, method, *arguments))


if __name__ == "__main__":
    _serve(sys.argv[1], Connection(int(sys.argv[2])))
