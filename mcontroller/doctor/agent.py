"""The part of ``doctor`` that runs on a node: it reads facts, listens, connects, and runs gpucheck."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from mcontroller.doctor.facts import NodeFacts, collect_facts
from mcontroller.doctor.node_checks import interfaces_named

__all__ = ["NodeAgent"]

_GREETING = b"doctor"


class NodeAgent:
    """A node as the other nodes see it. Create it on the node, directly or as a Ray actor.

    Args:
        address: of the node.
        ray_resources: the node's resources as Ray counts them; None without Ray.
    """

    def __init__(self, address: str, ray_resources: Mapping[str, float] | None = None) -> None:
        self.address = address
        self.ray_resources = ray_resources
        # A worker of Ray has variables that Ray set; those of the raylet are what a run starts from.
        parent = psutil.Process().parent() if ray_resources is not None else None
        self.variables: Mapping[str, str] = dict(os.environ) if parent is None else parent.environ()

    def facts(self, checkpoints: str | None) -> NodeFacts:
        """Return the facts of the node."""
        return collect_facts(self.address, self.variables, checkpoints, self.ray_resources)

    def now(self) -> float:
        """Return the time of the node's clock, in seconds since 1970."""
        return time.time()

    def listen(self) -> tuple[list[str], int]:
        """Listen on an ephemeral port, and return the addresses to reach it at: Ray's, and that of NCCL's interface.

        Every connection gets its bytes back, until the process ends.
        """
        server = socket.create_server(("", 0), backlog=64)
        threading.Thread(target=_echo, args=(server,), daemon=True).start()
        addresses = [self.address]
        value = self.variables.get("NCCL_SOCKET_IFNAME")
        if value is not None:
            found = psutil.net_if_addrs()
            for name in interfaces_named(value, list(found)):
                addresses += [each.address for each in found[name] if each.family == socket.AF_INET and name != "lo"]
        return list(dict.fromkeys(addresses)), server.getsockname()[1]

    def connect(self, address: str, port: int, timeout_s: float) -> str | None:
        """Send a few bytes to a listening agent; return None if they come back, otherwise why not."""
        try:
            with socket.create_connection((address, port), timeout=timeout_s) as connection:
                connection.sendall(_GREETING)
                answer = connection.recv(len(_GREETING), socket.MSG_WAITALL)
        except OSError as error:
            return "no answer in time" if isinstance(error, TimeoutError) else (error.strerror or str(error))
        return None if answer == _GREETING else f"another program answers on port {port}"

    def write(self, path: str) -> None:
        """Create a file, and the directories above it."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(_GREETING)

    def sees(self, path: str) -> bool:
        """Return whether a file exists; listing its directory refreshes the cache of a network file system."""
        directory = Path(path).parent
        return directory.is_dir() and Path(path).name in os.listdir(directory)

    def remove(self, path: str) -> None:
        """Delete a file."""
        Path(path).unlink(missing_ok=True)

    def gpucheck(self, timeout_s: float) -> tuple[int, str]:
        """Run the smallest part of gpucheck in a new process, and return its exit status and what it printed."""
        command = [sys.executable, "-m", "mcontroller", "gpucheck", "--part", "a", "--scale", "tiny"]
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        if "CUDA_VISIBLE_DEVICES" in self.variables:
            environment["CUDA_VISIBLE_DEVICES"] = self.variables["CUDA_VISIBLE_DEVICES"]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            return 124, f"gpucheck did not end in {timeout_s:g} s"
        return done.returncode, done.stdout + done.stderr


def _echo(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        with connection:
            connection.settimeout(10.0)
            try:
                connection.sendall(connection.recv(len(_GREETING), socket.MSG_WAITALL))
            except OSError:
                continue  # the other side reports what went wrong
