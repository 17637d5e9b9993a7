"""State in memory: the newest state of a run in processes that outlive its groups, on two nodes.

Each node has a ``StateHolder``, whose files exist only as its descriptors (``memfd_create``): they outlive the ranks,
and end with the holder, however that ends. A rank writes its file on its own node; while the run goes on, the next node
gets a copy, and all are hashed. After a failure, only ranks whose node has no file of theirs get it from another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mcontroller.errors import ConfigError
from mcontroller.files import sha256_of
from mcontroller.group import WorkerGroup
from parallel_state.axes import RANK_AXIS
from trainer.saving.run_record import RunState
from trainer.stages import SharedDevices
from workers.role_worker import RoleWorker

CHUNK = 1 << 26
"""Bytes that travel between nodes at a time."""

THIS_PROCESS = ""
"""In place of the id of a node, for groups of this process."""

COPY_SECONDS = 600.0
"""Longest time that a node copies and hashes the files of a step."""

LOOK_SECONDS = 0.5
"""Time between two looks for lost nodes while a node copies."""

OF_REPLICAS = ("dp", "edp", RANK_AXIS)
"""The axes of data-parallel replicas; ranks without coordinates are replicas."""

_logger = logging.getLogger(__name__)


class StateHolder:
    """Files in the memory of this process, by name."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._digests: dict[str, str] = {}

    def create(self, names: Sequence[str]) -> list[str]:
        """Create empty files; return paths that processes of the same user on this node can write and read."""
        for name in names:
            self._files[name] = os.memfd_create(name)
        return self._paths(names)

    def _paths(self, names: Sequence[str]) -> list[str]:
        return [f"/proc/{os.getpid()}/fd/{self._files[name]}" for name in names]

    def keep_only(self, names: Sequence[str]) -> None:
        """Free the memory of all other files."""
        for name in self._files.keys() - names:
            self._digests.pop(name, None)
            os.close(self._files.pop(name))

    def hash(self, names: Sequence[str]) -> list[str]:
        """Record the SHA-256 of complete files, and return it."""
        for name in names:
            self._digests[name] = self._digest(name)
        return [self._digests[name] for name in names]

    def _digest(self, name: str) -> str:
        return sha256_of(self._paths([name])[0])

    def whole(self, names: Sequence[str]) -> list[str | None]:
        """Return the paths of files; None for one that this process does not have, or that is damaged."""
        known = [name in self._files and self._digests.get(name) == self._digest(name) for name in names]
        return [self._paths([name])[0] if is_known else None for name, is_known in zip(names, known, strict=True)]

    def read(self, name: str, offset: int) -> bytes:
        """Return the bytes of a file from an offset on, at most ``CHUNK``; none at its end."""
        return os.pread(self._files[name], CHUNK, offset)

    def pull(self, names: Sequence[str], source: Any) -> None:
        """Have another node's holder hash files, and copy them from there."""
        for name, digest in zip(names, ray.get(source.hash.remote(names)), strict=True):
            descriptor, offset = os.memfd_create(name), 0
            while data := ray.get(source.read.remote(name, offset)):
                offset += os.pwrite(descriptor, data, offset)
            self._files[name], self._digests[name] = descriptor, digest


@dataclass(frozen=True)
class _Step:
    """A step whose state all ranks have written: the pickled ``RunState``, and node and place of every rank."""

    number: int
    state: bytes
    nodes: Mapping[str, Sequence[str]]
    places: Mapping[str, Sequence[tuple[Any, ...]]]

    def choices(self, group: str, places: Sequence[tuple[Any, ...]]) -> list[list[str | None]]:
        """Return the files that the ranks of a group can load, the best of each rank first.

        In the layout that was saved each rank has its own file. With another number of data-parallel replicas, a rank
        can load those of all that are in the same place of their replica, its own first.

        Args:
            group: its name.
            places: the present place of each rank, see ``_places_of``.
        """
        before = self.places[group]
        if len(before) == len(places):
            return [[self.file(group, rank) for rank in range(len(places))]]
        same = [[rank for rank, other in enumerate(before) if other == place] for place in places]
        first = [sum(other == place for other in places[:rank]) for rank, place in enumerate(places)]
        return [
            [
                self.file(group, ranks[(first[rank] + choice) % len(ranks)]) if choice < len(ranks) else None
                for rank, ranks in enumerate(same)
            ]
            for choice in range(max(map(len, same)))
        ]

    def file(self, group: str, rank: int) -> str:
        return f"{group}.{rank}.{self.number}"

    def files(self, node: str | None = None) -> list[str]:
        """Return the names of the files, by default of all nodes."""
        return [
            self.file(group, rank)
            for group, nodes in self.nodes.items()
            for rank, rank_node in enumerate(nodes)
            if node in (None, rank_node)
        ]


class MemoryCheckpoints:
    """The newest state of a run in memory; while one is written, the one before it too. All groups have one step.

    Args:
        devices: the devices that the groups share.
        lost: returns Ray's ids of nodes that are lost, which Ray itself may notice many seconds later.

    Attributes:
        nbytes: bytes that the ranks wrote of the last state.
    """

    def __init__(self, devices: SharedDevices, lost: Callable[[], Collection[str]] = tuple) -> None:
        self.nbytes = 0
        self._devices = devices
        self._lost = lost
        self._holders: dict[str, Any] = {}
        self._steps: list[_Step] = []
        self._copying: list[Any] = []

    @property
    def step(self) -> int | None:
        """The newest step in memory; None if there is none."""
        return self._steps[-1].number if self._steps else None

    def check(self, groups: Mapping[str, WorkerGroup[Any]]) -> None:
        """Raise ConfigError if a group cannot save its state to memory."""
        for name, group in groups.items():
            if group.worker_cls.save_to_memory is RoleWorker.save_to_memory:
                raise ConfigError(
                    f"trainer.memory_save_freq is set, but {group.worker_cls.__name__} of group {name!r} does not "
                    "override save_to_memory(path) and load_from_memory(path): do so, or set "
                    "trainer.memory_save_freq=0",
                    key="trainer.memory_save_freq",
                    role=name,
                )

    def save(self, groups: Mapping[str, WorkerGroup[Any]], state: RunState) -> None:
        """Have every rank write its state; return when they have. Copies to other nodes follow while the run goes on.

        Args:
            groups: the groups to save, by name.
            state: the controller's own state.
        """
        self._finish_copies()
        self._free_others(self._steps[-1:])
        nodes = {name: _nodes_of(group) for name, group in groups.items()}
        places = {name: _places_of(group) for name, group in groups.items()}
        step = _Step(state.global_steps, pickle.dumps(state), nodes, places)
        paths: dict[str, str] = {}
        try:
            for node in {node for nodes in step.nodes.values() for node in nodes}:
                names = step.files(node)
                paths |= zip(names, self._value(self._begin(node, "create", names)), strict=True)
        except RayError as error:
            _logger.warning("the state of step %d is not in memory: %s", step.number, str(error).partition("\n")[0])
            return
        written = 0
        for name, group in groups.items():
            self._devices.make_room(group.save_to_memory)
            written += sum(group.save_to_memory([paths[step.file(name, rank)] for rank in range(group.world_size)]))
        self._steps.append(step)
        self.nbytes = written
        self._begin_copies(step)

    def load(self, groups: Mapping[str, WorkerGroup[Any]]) -> RunState | None:
        """Load the newest state that is whole into all groups, and return the controller's; None if there is none.

        Args:
            groups: the groups to load, by name. Compared with those that were saved, only the number of their
                data-parallel replicas may differ.

        Raises:
            CallRejected: the state depends on the number of replicas, which differs; some groups may have loaded it.
        """
        self._finish_copies()
        for place, step in reversed(list(enumerate(self._steps))):
            paths = {name: self._find(step, name, group) for name, group in groups.items()}
            if missing := [f"{name} rank {rank}" for name in paths for rank, path in paths[name].items() if not path]:
                _logger.warning("the state of step %d in memory has no copy of %s", step.number, ", ".join(missing))
                continue
            for name, group in groups.items():
                self._devices.make_room(group.load_from_memory)
                group.load_from_memory([paths[name][rank] for rank in range(group.world_size)])
            self._steps = self._steps[: place + 1]  # a later one is not whole: the next save must keep this one
            state: RunState = pickle.loads(step.state)
            return state
        return None

    def close(self) -> None:
        """Free the memory."""
        self._steps = []
        for node, holder in self._holders.items():
            if node == THIS_PROCESS:
                holder.keep_only([])
            elif ray.is_initialized():
                ray.kill(holder)
        self._holders = {}

    def _find(self, step: _Step, name: str, group: WorkerGroup[Any]) -> dict[int, str | None]:
        """Return the path of a whole file for every rank on its node; None if there is none."""
        nodes = _nodes_of(group)
        paths: dict[int, str | None] = dict.fromkeys(range(len(nodes)))
        for choice in step.choices(name, _places_of(group)):
            wanted = {rank: file for rank, file in enumerate(choice) if file is not None and paths[rank] is None}
            for node in dict.fromkeys(nodes):
                paths |= self._locate({rank: file for rank, file in wanted.items() if nodes[rank] == node}, node)
        return paths

    def _locate(self, wanted: Mapping[int, str], node: str) -> dict[int, str | None]:
        """Return the path of each file on a node, by rank, copied there if another node has it."""
        paths = dict(zip(wanted, self._whole(node, list(wanted.values())), strict=True))
        for other in [other for other in self._holders if other != node]:
            missing = [rank for rank, path in paths.items() if path is None]
            there = self._whole(other, [wanted[rank] for rank in missing])
            having = [rank for rank, path in zip(missing, there, strict=True) if path is not None]
            if having:
                copied = [wanted[rank] for rank in having]
                with _warning_of_copies():
                    self._value(self._begin(node, "pull", copied, source=other))
                    paths |= zip(having, self._whole(node, copied), strict=True)
        return paths

    def _whole(self, node: str, names: Sequence[str]) -> list[str | None]:
        try:
            paths: list[str | None] = self._value(self._begin(node, "whole", names)) if names else []
        except RayError:
            self._lose(node)
            return [None] * len(names)
        return paths

    def _begin_copies(self, step: _Step) -> None:
        """Have another node copy the files of each node, and the node itself hash them."""
        nodes = sorted({node for nodes in step.nodes.values() for node in nodes})
        others = nodes if THIS_PROCESS in nodes else [*nodes, *_other_nodes(nodes, self._lost())]
        for node in nodes:
            other, names = others[(others.index(node) + 1) % len(others)], step.files(node)
            with _warning_of_copies():
                if other == node:
                    self._copying.append(self._begin(node, "hash", names))
                else:
                    self._copying.append(self._begin(other, "pull", names, source=node))

    def _finish_copies(self) -> None:
        """Wait until the files of the last step are hashed and copied."""
        copying, self._copying = self._copying, []
        for copy in copying:
            with _warning_of_copies():
                self._value(copy)

    def _free_others(self, steps: Sequence[_Step]) -> None:
        self._steps = list(steps)
        kept = [name for step in steps for name in step.files()]
        for node in list(self._holders):
            try:
                self._value(self._begin(node, "keep_only", kept))
            except RayError:
                self._lose(node)

    def _lose(self, node: str) -> None:
        _logger.warning("the state in memory of node %s is lost with the process that held it", node)
        self._holders.pop(node, None)

    def _begin(self, node: str, method: str, *arguments: Any, source: str | None = None) -> tuple[Any, set[str]]:
        """Call the holder of a node, with that of another node that it reads from; return the answer and the nodes."""
        nodes = {node} if source is None else {node, source}
        if lost := nodes & {*self._lost()}:
            raise RayError(f"node {lost.pop()} is lost")
        if node not in self._holders:
            self._holders[node] = StateHolder() if node == THIS_PROCESS else _holder_on(node)
        call = getattr(self._holders[node], method)
        given = arguments if source is None else (*arguments, self._holders[source])
        return (call(*given) if node == THIS_PROCESS else call.remote(*given)), nodes

    def _value(self, begun: tuple[Any, set[str]]) -> Any:
        """Wait for a holder's answer, but not if one of its nodes is lost."""
        answer, nodes = begun
        if not isinstance(answer, ray.ObjectRef):
            return answer
        end = time.monotonic() + COPY_SECONDS
        while not ray.wait([answer], timeout=LOOK_SECONDS, fetch_local=False)[0] and time.monotonic() < end:
            if lost := nodes & {*self._lost()}:
                raise RayError(f"node {lost.pop()} was lost meanwhile")
        return ray.get(answer, timeout=0)


@contextlib.contextmanager
def _warning_of_copies() -> Iterator[None]:
    try:
        yield
    except RayError as error:
        text = "a copy of the state in memory has failed, because a node or its process has ended: %s"
        _logger.warning(text, str(error).partition("\n")[0])


def _nodes_of(group: WorkerGroup[Any]) -> list[str]:
    """Return Ray's id of the node of every rank, or ``THIS_PROCESS``."""
    return list(group.node_ids) or [THIS_PROCESS] * group.world_size


def _places_of(group: WorkerGroup[Any]) -> list[tuple[Any, ...]]:
    """Return the place of every rank in its data-parallel replica: its other coordinates."""
    ranks = map(group.topology.coordinates, range(group.world_size))
    return [
        tuple(sorted(coordinate for coordinate in rank.items() if coordinate[0] not in OF_REPLICAS)) for rank in ranks
    ]


def _other_nodes(nodes: Sequence[str], lost: Collection[str]) -> list[str]:
    """Return a node of the cluster without ranks, if all ranks are on one node."""
    if len(nodes) > 1:
        return []
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return sorted(alive - {*nodes, *lost})[:1]


def _holder_on(node: str) -> Any:
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(StateHolder).options(num_cpus=0, max_concurrency=4, scheduling_strategy=there).remote()
