"""Reservation of bundles in the cluster: one placement group for each declared node, in a stable order of ranks.

A reservation lasts from the first group in it to the last; one made by ``RayResourcePool.reserve``, or with spare
bundles, until its release.
"""

from __future__ import annotations

import ipaddress
import os
import sys
import threading
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mcontroller.errors import ResourceError
from mcontroller.ray.node_processes import session

if TYPE_CHECKING:
    from mcontroller.ray.process_handles import ProcessHandles


@dataclass(frozen=True, slots=True)
class NodeShape:
    """The resources of one declared node.

    Attributes:
        processes: number of bundles, all on the same node.
        bundle: name and amount of each resource of one bundle.
    """

    processes: int
    bundle: tuple[tuple[str, float], ...]

    @property
    def total(self) -> dict[str, float]:
        """The resources of all bundles together."""
        return {name: amount * self.processes for name, amount in self.bundle}

    def __str__(self) -> str:
        bundle = " + ".join(f"{amount:g} {name}" for name, amount in self.bundle)
        return f"{self.processes} bundle{'s' if self.processes > 1 else ''} of {bundle} on one node"


@dataclass(eq=False, slots=True)
class Bundle:
    """One bundle of a placement group: a GPU, or CPUs, for one process of each of several groups.

    Attributes:
        group: the placement group.
        index: index in the placement group.
        node: index of the declared node, in rank order.
        local_rank: index on the node.
        address: address of the node.
        node_id: Ray's id of the node.
        gpu: name of the GPU on the node, as CUDA_VISIBLE_DEVICES has it: an index, or the UUID of a GPU or of a MIG
            device; None without a GPU.
        holders: the group that holds each slot; None for a free slot.
    """

    group: PlacementGroup
    index: int
    node: int
    local_rank: int
    address: str
    node_id: str
    gpu: str | None
    holders: list[str | None] = field(default_factory=list)

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """The scheduling strategy of a process in this bundle."""
        return PlacementGroupSchedulingStrategy(self.group, self.index)


class Reservation:
    """Bundles of these shapes. ``bundles()`` reserves them on demand, ``release`` returns them to the cluster.

    Args:
        shapes: the declared nodes.
        slots: slots of each bundle.
        name: name of the pool, for the names of the placement groups.
        detached: whether the placement groups outlive this driver.
        spare: more bundles on each node, which take the place of those on a node that is lost.

    Attributes:
        processes: the processes that this driver has started in the bundles, by the lease of their slots.
        lock: held while bundles are reserved, leased or returned, because several threads may start groups.
    """

    def __init__(self, shapes: Sequence[NodeShape], slots: int, name: str, detached: bool, spare: int = 0) -> None:
        self.shapes = tuple(shapes)
        self.slots = slots
        self.name = name
        self.detached = detached
        self.spare = spare
        self.pinned = spare > 0
        self.processes: dict[object, ProcessHandles] = {}  # also of a group that was garbage-collected and did not end
        self.lock = threading.RLock()
        self._bundles: list[Bundle] = []
        self._spares: list[Bundle] = []
        self._groups: list[PlacementGroup] = []
        self._session: object = None
        if not detached:
            weakref.finalize(self, _remove_in, os.getpid(), self._groups)

    @property
    def running(self) -> str:
        """The processes of all groups that SIGKILL has not ended, for messages."""
        return "; ".join(text for processes in tuple(self.processes.values()) for text in processes.running)

    @property
    def held(self) -> bool:
        """Whether the bundles are reserved now, in the cluster that this driver is connected to."""
        return bool(self._bundles) and self._session == session()

    def bundles(self, timeout: float = 10.0) -> list[Bundle]:
        """Return the bundles in rank order; reserve them if they are not reserved yet.

        Raises:
            ResourceError: the cluster is too small (at once), or others use its resources (after ``timeout`` seconds);
                or Ray assigns one GPU to two bundles.
        """
        with self.lock:
            if not self.held:
                self._reserve(timeout)
            return self._bundles

    def _reserve(self, timeout: float) -> None:
        whole = [replace(shape, processes=shape.processes + self.spare) for shape in self.shapes]
        self._groups[:] = _placement_groups(whole, self.name, self.detached, timeout)
        try:
            ordered = _in_rank_order(self._groups, self.slots)
            counts = {group: shape.processes for group, shape in zip(self._groups, self.shapes, strict=True)}
            self._bundles = [bundle for bundle in ordered if bundle.local_rank < counts[bundle.group]]
            self._spares = [bundle for bundle in ordered if bundle.local_rank >= counts[bundle.group]]
        except BaseException:
            _remove(self._groups)
            raise
        self._session = session()

    def replace_lost(self, lost: Collection[str]) -> None:
        """Take spare bundles in place of those on lost nodes. Ranks keep their numbers.

        Args:
            lost: Ray's ids of nodes that are lost, also if Ray has not noticed it yet.

        Raises:
            ResourceError: fewer spare bundles are left than were lost.
        """
        if not self.spare or not self.held:
            return
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - {*lost}
        spares = [bundle for bundle in self._spares if bundle.node_id in alive]
        gone = [rank for rank, bundle in enumerate(self._bundles) if bundle.node_id not in alive]
        if len(gone) > len(spares):
            raise ResourceError(
                f"pool {self.name!r} has lost the bundles of ranks {', '.join(map(str, gone))} with their nodes, and "
                f"has {len(spares)} spare bundles on others: start with more spare_bundles on each node, now "
                f"{self.spare}, or more nodes",
                pool=self.name,
                lost=gone,
                spare=len(spares),
            )
        together = Counter(bundle.node_id for bundle in spares)
        spares.sort(key=lambda bundle: -together[bundle.node_id])
        for group in {self._bundles[rank].group for rank in gone}:  # Ray would place it again, and nobody use it
            remove_placement_group(group)
            self._groups.remove(group)
        for rank in gone:
            self._bundles[rank] = spares.pop(0)
        self._spares = spares

    def release_if_unused(self) -> None:
        """Release the bundles if no group holds a slot of them, unless the reservation is pinned."""
        if not self.pinned and not any(holder for bundle in self._bundles for holder in bundle.holders):
            self.release()

    def release(self) -> None:
        """Return the bundles to the cluster. Ray ends every process that still runs in them."""
        with self.lock:
            if self.held:
                _remove(self._groups)
            self._groups.clear()
            self._bundles, self._spares = [], []
            self.pinned = self.spare > 0


def _remove(groups: list[PlacementGroup]) -> None:
    for group in groups:
        remove_placement_group(group)
    groups.clear()


def _remove_in(pid: int, groups: list[PlacementGroup]) -> None:
    if ray.is_initialized() and os.getpid() == pid:  # not in a fork
        _remove(groups)


def by_address(address: str) -> tuple[int, int, str]:
    """Return a key that sorts addresses as numbers: 10.0.0.9 comes before 10.0.0.10. Host names come last."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return 99, 0, address
    return parsed.version, int(parsed), address


def fits(shapes: Iterable[NodeShape], nodes: Sequence[dict[str, float]]) -> bool:
    """Return whether every shape fits on a node; several may share one that has room (first fit, largest first)."""
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
    """Raise ResourceError if the cluster has no room for all shapes together, even if nothing else ran on it."""
    if not fits(shapes, cluster_nodes()):
        raise _resource_error(shapes, name, "the cluster does not have it")


def _placement_groups(shapes: Sequence[NodeShape], name: str, detached: bool, timeout: float) -> list[PlacementGroup]:
    check_fits(shapes, name)
    lifetime = "detached" if detached else None
    groups: list[PlacementGroup] = []
    deadline = time.monotonic() + timeout
    try:
        for number, shape in enumerate(shapes):
            unique = f"{name}/{uuid.uuid4().hex[:8]}/{number}"
            bundles = [dict(shape.bundle) for _ in range(shape.processes)]
            groups.append(placement_group(bundles, strategy="STRICT_PACK", name=unique, lifetime=lifetime))
        for group in groups:
            if not group.wait(max(0.0, deadline - time.monotonic())):
                raise _resource_error(shapes, name, f"it did not become free within {timeout:g} s")
    except BaseException:  # also Ctrl-C: only this function knows these groups
        for group in groups:
            remove_placement_group(group)
        raise
    return groups


def cluster_nodes(without: Collection[str] = (), *, free: bool = False) -> list[dict[str, float]]:
    """Return the resources of each node of the cluster, by address.

    Args:
        without: Ray's ids of nodes to leave out.
        free: only what nothing uses.
    """
    alive = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in without]
    unused = available_resources_per_node() if free else {}
    ordered = sorted(alive, key=lambda node: by_address(node["NodeManagerAddress"]))
    return [unused.get(node["NodeID"], {}) if free else node["Resources"] for node in ordered]


def _resource_error(shapes: Sequence[NodeShape], name: str, why: str) -> ResourceError:
    nodes = cluster_nodes()
    resources = {resource for shape in shapes for resource in shape.total}
    exists = [{resource: node.get(resource, 0) for resource in sorted(resources)} for node in nodes]
    free = ray.available_resources()
    total = {resource: sum(node[resource] for node in exists) for resource in sorted(resources)}
    in_use = {resource: amount - free.get(resource, 0) for resource, amount in total.items()}
    requested = "; ".join(map(str, shapes))
    has = "; ".join(" + ".join(f"{amount:g} {resource}" for resource, amount in node.items()) for node in exists)
    used = " + ".join(f"{amount:g} {resource}" for resource, amount in in_use.items())
    holders = sorted(
        {entry["name"].rsplit("/", 2)[0] for entry in placement_group_table().values() if entry["state"] == "CREATED"}
    )
    by = f" by {', '.join(holders)}" if holders else ""
    no_gpus = "GPU" in resources and not any(node["GPU"] for node in exists)
    fix = (
        "No node has a GPU: pass use_gpu=False to RayResourcePool for processes on CPUs"
        if no_gpus
        else "A bundle has a CPU for each of its max_colocate_count slots: ask for fewer processes or slots, or start"
        " Ray with more"
    )
    there = f"{len(nodes)} node(s) with {has}; taken: {used}{by}. {fix}" if nodes else "all its nodes have ended"
    return ResourceError(
        f"pool {name!r} asks for {requested}, and {why}: {there}",
        requested=[shape.total for shape in shapes],
        exists=exists,
        in_use=in_use,
        holders=holders,
    )


def _in_rank_order(groups: Sequence[PlacementGroup], slots: int) -> list[Bundle]:
    """Order bundles by node address, then by GPU index, so that every rank keeps its device after a restart."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    located: list[tuple[Any, PlacementGroup, str, str]] = []
    for position, group in enumerate(groups):
        node_ids = placement_group_table(group)["bundles_to_node_id"]
        address = addresses[node_ids[0]]
        located.append(((by_address(address), position), group, address, node_ids[0]))
    bundles: list[Bundle] = []
    for node, (_, group, address, node_id) in enumerate(sorted(located, key=lambda entry: entry[0])):
        for local_rank, (gpu, index) in enumerate(_by_gpu(group)):
            bundles.append(Bundle(group, index, node, local_rank, address, node_id, gpu, [None] * slots))
    return bundles


def _by_gpu(group: PlacementGroup) -> Sequence[tuple[str | None, int]]:
    """Return GPU name and bundle index of every bundle of a node, by GPU; the former is None without GPUs."""
    indices = range(group.bundle_count)
    if "GPU" not in group.bundle_specs[0]:
        return [(None, index) for index in indices]
    asks = [
        _gpu_name.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote()
        for index in indices
    ]
    named = zip(gpus_of_bundles(ray.get(asks)), indices, strict=True)
    return sorted(named, key=lambda bundle: by_name(bundle[0]))


def by_name(gpu: str) -> tuple[int, str]:
    """Return a key that sorts GPUs by index: 10 comes after 9. UUIDs come last."""
    return (int(gpu), "") if gpu.isdecimal() else (sys.maxsize, gpu)


def gpus_of_bundles(gpus: list[list[str]]) -> list[str]:
    """Return the GPU of every bundle of a node, of which each must have its own."""
    names = [name for bundle in gpus for name in bundle]
    if len(names) != len(gpus) or len(set(names)) != len(names):
        raise ResourceError(
            f"Ray assigns the GPUs {gpus} to the {len(gpus)} bundles of a node, but each needs a separate one: do not "
            "set CUDA_VISIBLE_DEVICES in the runtime_env of ray.init, set it where `ray start` runs",
            gpus=gpus,
        )
    return names


@ray.remote(num_cpus=0, num_gpus=0.001, max_retries=0)
def _gpu_name() -> list[str]:
    return [str(name) for name in ray.get_gpu_ids()]
