"""Bundles reserved in the cluster: one placement group per declared node, found again in a stable order.

A reservation is held from its first tenant to its last, or until it is released when it was asked for by name.
"""

from __future__ import annotations

import ipaddress
import time
import uuid
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mcontroller.errors import ResourceError

__all__ = ["Bundle", "NodeShape", "Reservation", "by_address", "check_fits", "fits", "session"]


@dataclass(frozen=True, slots=True)
class NodeShape:
    """What one declared node asks for: ``processes`` bundles of these resources, all on one node."""

    processes: int
    bundle: tuple[tuple[str, float], ...]

    @property
    def total(self) -> dict[str, float]:
        return {name: amount * self.processes for name, amount in self.bundle}

    def __str__(self) -> str:
        return " + ".join(f"{amount:g} {name}" for name, amount in self.total.items()) + " on one node"


@dataclass(eq=False, slots=True)
class Bundle:
    """One place in the cluster that hosts as many processes as the pool has slots; ``tenants`` has one entry a slot."""

    group: PlacementGroup
    index: int
    node: int  # index of the declared node, in rank order
    local_rank: int
    address: str
    gpu: int | None
    peer_gpus: tuple[int, ...]  # of all bundles of this node, in local rank order
    tenants: list[str | None] = field(default_factory=list)

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self.group, self.index)


class Reservation:
    """Bundles of these shapes, taken on demand: ``bundles()`` reserves them, ``leave`` gives them back."""

    def __init__(self, shapes: Sequence[NodeShape], slots: int, name: str, detached: bool) -> None:
        self.shapes = tuple(shapes)
        self.slots = slots
        self.name = name
        self.detached = detached
        self.pinned = detached
        self._bundles: list[Bundle] = []
        self._groups: list[PlacementGroup] = []
        self._session: tuple[str, str] | None = None
        if not detached:
            weakref.finalize(self, _remove, self._groups)

    @classmethod
    def attached(cls, groups: Sequence[PlacementGroup], shapes: Sequence[NodeShape], slots: int, name: str) -> Self:
        """The detached reservation that another driver made."""
        reservation = cls(shapes, slots, name, detached=True)
        reservation._hold(groups)
        return reservation

    @property
    def held(self) -> bool:
        """Whether the cluster holds the bundles for us now; a cluster that has been left holds nothing."""
        return bool(self._bundles) and self._session == session()

    def bundles(self, timeout: float = 10.0) -> list[Bundle]:
        """The bundles in rank order, reserved if they are not yet.

        Raises ResourceError at once for what the cluster does not have, and after ``timeout`` seconds for what is
        taken by others.
        """
        if not self.held:
            self._hold(_reserve(self.shapes, self.name, self.detached, timeout))
        return self._bundles

    def _hold(self, groups: Sequence[PlacementGroup]) -> None:
        self._groups[:] = groups
        self._bundles = _in_rank_order(groups, self.slots)
        self._session = session()

    def leave(self) -> None:
        """Gives the bundles back when nobody is left on them and nobody asked for them to be kept."""
        if not self.pinned and not any(tenant for bundle in self._bundles for tenant in bundle.tenants):
            self.release()

    def release(self) -> None:
        """Gives the bundles back now; whatever still runs on them is ended by Ray."""
        if self.held:
            _remove(self._groups)
        self._groups.clear()
        self._bundles = []
        self.pinned = self.detached


def _remove(groups: Sequence[PlacementGroup]) -> None:
    if ray.is_initialized():
        for group in groups:
            remove_placement_group(group)


def by_address(address: str) -> tuple[int, int, str]:
    """Sorts addresses as numbers, so that 10.0.0.9 comes before 10.0.0.10; names that are no addresses come last."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return 99, 0, address
    return parsed.version, int(parsed), address


def fits(shapes: Iterable[NodeShape], nodes: Sequence[dict[str, float]]) -> bool:
    """Whether every shape finds a node, several shapes sharing one where there is room (first fit, largest first)."""
    left = [dict(node) for node in nodes]
    for shape in sorted(shapes, key=lambda shape: -shape.processes):
        for node in left:
            if all(node.get(name, 0) >= amount for name, amount in shape.total.items()):
                for name, amount in shape.total.items():
                    node[name] -= amount
                break
        else:
            return False
    return True


def check_fits(shapes: Sequence[NodeShape], name: str) -> None:
    """Raises ResourceError when the cluster, were it empty, would have no room for all of these."""
    if not fits(shapes, _nodes()):
        raise _too_large(shapes, name, "the cluster does not have it")


def session() -> tuple[str, str] | None:
    """Names this driver's time with its cluster; None where Ray does not run."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


def _reserve(shapes: Sequence[NodeShape], name: str, detached: bool, timeout: float) -> list[PlacementGroup]:
    check_fits(shapes, name)
    lifetime = "detached" if detached else None
    groups = []
    for number, shape in enumerate(shapes):
        unique = f"{name}/{uuid.uuid4().hex[:8]}/{number}"
        bundles = [dict(shape.bundle) for _ in range(shape.processes)]
        groups.append(placement_group(bundles, strategy="STRICT_PACK", name=unique, lifetime=lifetime))
    deadline = time.monotonic() + timeout
    for group in groups:
        if not group.wait(max(0.0, deadline - time.monotonic())):
            for each in groups:
                remove_placement_group(each)
            raise _too_large(shapes, name, f"it did not become free within {timeout:g} s")
    return groups


def _nodes() -> list[dict[str, float]]:
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [node["Resources"] for node in sorted(alive, key=lambda node: by_address(node["NodeManagerAddress"]))]


def _too_large(shapes: Sequence[NodeShape], name: str, why: str) -> ResourceError:
    nodes = _nodes()
    resources = {resource for shape in shapes for resource in shape.total}
    exists = [{name: node.get(name, 0) for name in sorted(resources)} for node in nodes]
    free = ray.available_resources()
    taken = {name: sum(node[name] for node in exists) - free.get(name, 0) for name in sorted(resources)}
    asked = "; ".join(map(str, shapes))
    has = "; ".join(" + ".join(f"{amount:g} {name}" for name, amount in node.items()) for node in exists)
    used = " + ".join(f"{amount:g} {name}" for name, amount in taken.items())
    holders = sorted(
        {entry["name"].rsplit("/", 2)[0] for entry in placement_group_table().values() if entry["state"] == "CREATED"}
    )
    by = f" by {', '.join(holders)}" if holders else ""
    return ResourceError(
        f"pool {name!r} asks for {asked}, and {why}: {len(nodes)} node(s) with {has}; taken: {used}{by}. "
        "Ask for fewer processes or slots, or start Ray with more",
        asked=[shape.total for shape in shapes],
        exists=exists,
        taken=taken,
        holders=holders,
    )


def _in_rank_order(groups: Sequence[PlacementGroup], slots: int) -> list[Bundle]:
    """Nodes by address, then GPUs by index, so that a restart puts every rank where it was."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    placed: list[tuple[Any, PlacementGroup, str]] = []
    for position, group in enumerate(groups):
        node_ids = placement_group_table(group)["bundles_to_node_id"]
        address = addresses[node_ids[0]]
        placed.append(((by_address(address), position), group, address))
    bundles: list[Bundle] = []
    for node, (_, group, address) in enumerate(sorted(placed, key=lambda entry: entry[0])):
        order = _by_gpu(group)
        gpus = tuple(gpu for gpu, _ in order if gpu is not None)
        for local_rank, (gpu, index) in enumerate(order):
            bundles.append(Bundle(group, index, node, local_rank, address, gpu, gpus, [None] * slots))
    return bundles


def _by_gpu(group: PlacementGroup) -> list[tuple[int | None, int]]:
    """GPU index and bundle index of every bundle of a node, by GPU; None where bundles have no GPU."""
    indices = range(group.bundle_count)
    if "GPU" not in group.bundle_specs[0]:
        return [(None, index) for index in indices]
    asks = [
        _gpu_index.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote()
        for index in indices
    ]
    return sorted(zip(ray.get(asks), indices, strict=True))


@ray.remote(num_cpus=0, num_gpus=0.001, max_retries=0)
def _gpu_index() -> int:
    return int(ray.get_gpu_ids()[0])
