"""Agents on every node of a Ray cluster, or in this process."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from mcontroller.doctor.agent import NodeAgent
from mcontroller.errors import ResourceError

__all__ = ["LocalNode", "Node", "RayNode", "ask_all", "ray_nodes"]

T = TypeVar("T")


class Node(Protocol):
    """An agent that can be asked; see ``NodeAgent`` for the questions."""

    address: str

    def ask(self, question: str, *args: Any) -> Any:
        """Return the agent's answer to a question: the name of a method of ``NodeAgent``."""
        ...


class LocalNode:
    """This machine, without a cluster."""

    def __init__(self) -> None:
        self.address = socket.gethostname()
        self._agent = NodeAgent(self.address)

    def ask(self, question: str, *args: Any) -> Any:
        """Return the answer of the agent in this process."""
        return getattr(self._agent, question)(*args)


class RayNode:
    """A node of a Ray cluster, with an agent on it.

    Args:
        address: of the node.
        agent: the handle of the actor.
        timeout_s: seconds for one answer.
    """

    def __init__(self, address: str, agent: Any, timeout_s: float) -> None:
        self.address = address
        self._agent = agent
        self._timeout_s = timeout_s

    def ask(self, question: str, *args: Any) -> Any:
        """Return the answer of the agent on the node.

        Raises:
            ResourceError: the agent cannot start, or does not answer in time.
        """
        import ray
        from ray.exceptions import RayError

        try:
            return ray.get(getattr(self._agent, question).remote(*args), timeout=self._timeout_s)
        except RayError as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            raise ResourceError(
                f"node {self.address} does not answer {question!r} within {self._timeout_s:g} s: "
                f"{lines[-1].strip() if lines else type(error).__name__}",
                node=self.address,
                question=question,
            ) from error

    def end(self) -> None:
        """End the agent."""
        import ray

        ray.kill(self._agent)


def ray_nodes(timeout_s: float) -> list[RayNode]:
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
        nodes.append(RayNode(address, agent, timeout_s))
    return nodes


def ask_all(
    nodes: Sequence[Node], question: str, arguments: Callable[[int], tuple[Any, ...]]
) -> Iterator[tuple[Node, Any]]:
    """Ask all nodes at the same time, and iterate over the nodes with their answers, or the ResourceErrors.

    Args:
        nodes: whom to ask.
        question: the name of a method of ``NodeAgent``.
        arguments: from the index of a node to the arguments of the method.
    """

    def ask(index: int) -> Any:
        try:
            return nodes[index].ask(question, *arguments(index))
        except ResourceError as error:
            return error

    with ThreadPoolExecutor(max_workers=max(1, len(nodes))) as pool:
        yield from zip(nodes, pool.map(ask, itertools.islice(itertools.count(), len(nodes))), strict=True)
