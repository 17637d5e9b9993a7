"""Agents that run on every node of a Ray cluster, or in this process: read facts, connect, run gpucheck."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from mcontroller.doctor.checks import interfaces_named
from mcontroller.doctor.facts import NodeFacts, collect_facts
from mcontroller.errors import ResourceError

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
        # Ray sets variables in its workers; a run starts from the raylet's variables.
        parent = psutil.Process().parent() if ray_resources is not None else None
        self.variables: Mapping[str, str] = dict(os.environ) if parent is None else parent.environ()

    def facts(self, checkpoints: str | None) -> NodeFacts:
        """Return the facts of the node."""
        return collect_facts(self.address, self.variables, checkpoints, self.ray_resources)

    def now(self) -> float:
        """Return the time of the node's clock, in seconds since 1970."""
        return time.time()

    def listen(self) -> tuple[list[str], int]:
        """Listen on an ephemeral port, and return it with its addresses: Ray's, and the one of NCCL's interface.

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


class Node:
    """A node with an agent on it.

    Args:
        address: of the node.
        agent: the agent, or the handle of the actor that it is.
        timeout_s: seconds for one answer of an actor; None for an agent in this process.
    """

    def __init__(self, address: str, agent: Any, timeout_s: float | None = None) -> None:
        self.address = address
        self._agent = agent
        self._timeout_s = timeout_s

    def ask(self, question: str, *args: Any) -> Any:
        """Return the agent's answer to a question: the name of a method of ``NodeAgent``.

        Raises:
            ResourceError: the actor cannot start, or does not answer in time.
        """
        method = getattr(self._agent, question)
        if self._timeout_s is None:
            return method(*args)
        import ray
        from ray.exceptions import RayError

        try:
            return ray.get(method.remote(*args), timeout=self._timeout_s)
        except RayError as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            raise ResourceError(
                f"node {self.address} does not answer {question!r} within {self._timeout_s:g} s: "
                f"{lines[-1].strip() if lines else type(error).__name__}",
                node=self.address,
                question=question,
            ) from error

    def end(self) -> None:
        """End the actor."""
        import ray

        ray.kill(self._agent)


def local_node() -> Node:
    """Return this machine, without a cluster."""
    return Node(socket.gethostname(), NodeAgent(socket.gethostname()))


def ray_nodes(timeout_s: float) -> list[Node]:
    """Start an agent on every live node of the connected cluster, and return them in order of their addresses.

    Agents ask for no resources, so that they run on a cluster that is in use.

    Args:
        timeout_s: seconds for one answer.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(num_cpus=0, runtime_env={"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}})(NodeAgent)
    nodes = []
    alive: list[Mapping[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
    for node in sorted(alive, key=lambda node: (node["NodeManagerAddress"], node["NodeID"])):
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        address = node["NodeManagerAddress"]
        agent = remote.options(scheduling_strategy=strategy).remote(address, node["Resources"])
        nodes.append(Node(address, agent, timeout_s))
    return nodes


def ask_all(nodes: Sequence[Node], question: str, *args: Any) -> Iterator[tuple[Node, Any]]:
    """Ask all nodes at the same time, and iterate over the nodes with their answers, or the ResourceErrors.

    Args:
        nodes: whom to ask.
        question: the name of a method of ``NodeAgent``.
        args: the arguments of the method.
    """

    def ask(node: Node) -> Any:
        try:
            return node.ask(question, *args)
        except ResourceError as error:
            return error

    with ThreadPoolExecutor(max_workers=max(1, len(nodes))) as pool:
        yield from zip(nodes, pool.map(ask, nodes), strict=True)
