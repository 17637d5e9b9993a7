"""Pools of bundles in the cluster, the slots that groups lease in them, and the pools of several roles."""

from __future__ import annotations

import copy
import itertools
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

import ray

from mcontroller.channel.options import ChannelOptions
from mcontroller.errors import ConfigError, ResourceError, close_all
from mcontroller.ray.reservation import Bundle, NodeShape, Reservation, check_fits
from parallel_state.axes import is_count
from parallel_state.describe import table_text

_unnamed = itertools.count()


class ResourcePool:
    """Number of processes on each node, and how many groups may share each bundle.

    Args:
        process_on_nodes: number of processes on each node.
        max_colocate_count: slots of each bundle: how many processes, each of another group, may share it.

    Raises:
        ResourceError: ``process_on_nodes`` is not a list or is empty, or a count is not a positive integer.
    """

    def __init__(self, process_on_nodes: Iterable[int] | None = None, max_colocate_count: int = 1) -> None:
        is_list = isinstance(process_on_nodes, Iterable) and not isinstance(process_on_nodes, str)
        counts = list(process_on_nodes) if is_list else []  # type: ignore[arg-type]  # an iterable then
        valid = all(map(is_count, (*counts, max_colocate_count)))
        if not valid or not (counts or process_on_nodes is None):
            raise ResourceError(
                f"process_on_nodes={process_on_nodes!r}, max_colocate_count={max_colocate_count!r}: expected a list "
                f"with the number of processes on each node, at least 1, as {type(self).__name__}([8, 8])",
                process_on_nodes=process_on_nodes,
                max_colocate_count=max_colocate_count,
            )
        self._store = counts
        self.max_colocate_count = max_colocate_count

    @property
    def world_size(self) -> int:
        """Number of processes of a group in the pool."""
        return sum(self._store)


class RayResourcePool(ResourcePool):
    """GPUs, or CPUs, of a Ray cluster: ``process_on_nodes[i]`` bundles on the i-th node.

    A group leases one slot of every bundle, with ``gpu_share`` of its GPU. The pool is reserved in the
    cluster when the first group starts or ``reserve`` is called, and released when the last group ends or ``shutdown``
    is called. Ranks are ordered by node address, then by GPU index (UUIDs of GPUs or MIG devices: alphabetically).

    Args:
        process_on_nodes: number of processes on each node.
        use_gpu: whether each bundle has a GPU; False for processes on CPUs.
        name_prefix: name of the pool in messages.
        max_colocate_count: slots of each bundle: how many processes, each of another group, may share it.
        detached: whether the pool outlives its driver, as long as it has groups.
        accelerator_type: use only nodes with GPUs of this type, e.g. ``"H100"``.
        isolate_gpus: whether each process sees only its own GPU, as ``cuda:0``. By default it sees the GPUs of all
            ranks of its group on its node, and its own is ``cuda:LOCAL_RANK`` and current. MIG devices are always
            isolated, because CUDA shows a process only one.
        warm_start: whether the processes of a node are forked from one that has imported torch, where that is safe;
            see ``mcontroller.ray.warm_start``.
        channel: ports of the processes, and the size of values that travel inside messages.
        threads: threads that each process computes with on the CPU. By default OMP_NUM_THREADS of the node's Ray if
            it is set, or the CPUs that a process asks for; otherwise, without GPUs, the cores of the node divided by
            the processes of a group there, and those of a group of each other pool of one ``ResourcePoolManager``; and
            1 with GPUs or ``warm_start=False``.
        logs: directory for a file of the output of each rank, named by group, rank and coordinates; nodes that do not
            share it have their own. None: only Ray's files.
        spare_bundles: more bundles on each node, in which a restart places the processes of a node that is lost. Such
            a pool is reserved until ``shutdown``.

    Raises:
        ResourceError: ``process_on_nodes`` is not a list or is empty, or a count is not a positive integer.
    """

    def __init__(
        self,
        process_on_nodes: Iterable[int],
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 1,
        detached: bool = False,
        accelerator_type: str | None = None,
        isolate_gpus: bool = False,
        warm_start: bool = True,
        channel: ChannelOptions | None = None,
        threads: int | None = None,
        logs: str | os.PathLike[str] | None = None,
        spare_bundles: int = 0,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        if not isinstance(spare_bundles, int) or spare_bundles < 0:
            text = f"spare_bundles is {spare_bundles!r}; expected a number of bundles on each node, 0 for none"
            raise ResourceError(text, spare_bundles=spare_bundles)
        self.use_gpu = use_gpu
        self.name_prefix = name_prefix or f"pool{next(_unnamed)}"
        self.detached = detached
        self.accelerator_type = accelerator_type
        self.isolate_gpus = isolate_gpus
        self.warm_start = warm_start
        self.channel = channel or ChannelOptions()
        self.threads = threads
        self.logs = None if logs is None else os.path.abspath(logs)
        self._beside: tuple[Reservation, ...] = ()
        self._reservation = Reservation(self.shapes, max_colocate_count, self.name_prefix, detached, spare_bundles)
        self._ranks = range(self.world_size)

    @property
    def shapes(self) -> list[NodeShape]:
        """The resources that the pool needs on each of its nodes."""
        bundle: dict[str, float] = {"CPU": self.max_colocate_count}
        if self.use_gpu:
            bundle["GPU"] = 1
        if self.accelerator_type is not None:
            bundle[f"accelerator_type:{self.accelerator_type}"] = 0.001
        return [NodeShape(count, tuple(bundle.items())) for count in self._store]

    @property
    def gpu_share(self) -> float:
        """The part of a GPU that a process reserves; Ray counts in 1/10,000, and rounds 1/6 and 1/7 up."""
        return math.floor(10_000 / self.max_colocate_count) / 10_000 if self.use_gpu else 0

    # ---- bundles ---------------------------------------------------------------------------------------------------

    def reserve(self, timeout: float = 10.0) -> Self:
        """Reserve the pool in the cluster now, until ``shutdown``, and return it.

        Raises:
            ResourceError: the cluster is too small (at once), or others use its resources (after ``timeout`` seconds).
        """
        self.bundles(timeout)
        self._reservation.pinned = True
        return self

    def bundles(self, timeout: float = 10.0) -> list[Bundle]:
        """Return the bundle of every rank, in rank order; reserve them if they are not reserved yet.

        Raises:
            ResourceError: as ``reserve`` does.
        """
        bundles = self._reservation.bundles(timeout)[self._ranks.start : self._ranks.stop]
        self._store = [len(list(same)) for _, same in itertools.groupby(bundle.node for bundle in bundles)]
        return bundles

    def replace_lost(self, lost: Collection[str]) -> None:
        """Take spare bundles in place of those on lost nodes; see ``Reservation.replace_lost``."""
        with self._reservation.lock:
            self._reservation.replace_lost(lost)

    def set_beside(self, pools: Iterable[RayResourcePool]) -> None:
        """Share the cores of each node with the groups of these pools, by the default of ``threads``."""
        self._beside = tuple(pool._reservation for pool in pools)

    def bundles_beside(self) -> list[Bundle]:
        """Return the bundles of the pools of ``set_beside``; reserve them if they are not reserved yet.

        Raises:
            ResourceError: as ``reserve`` does.
        """
        return [bundle for reservation in self._beside for bundle in reservation.bundles()]

    def shutdown(self) -> None:
        """Return the bundles to the cluster. Ends every process that still runs in them; a second call does nothing.

        Raises:
            ResourceError: SIGKILL has not ended a process. The pool keeps its bundles; a second call tries again.
        """
        for processes in tuple(self._reservation.processes.values()):  # else their groups would report that they died
            processes.end()
        running = self._reservation.running
        if running and self._reservation.held:
            raise ResourceError(
                f"pool {self.name_prefix!r} keeps its bundles, because SIGKILL has not ended processes in them: "
                f"{running}. Shut it down again when they have ended, or leave their nodes out",
                pool=self.name_prefix,
                running=running,
            )
        self._reservation.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # ---- slots -----------------------------------------------------------------------------------------------------

    def lease(self, group: str, timeout: float = 10.0) -> SlotLease:
        """Take one slot of every bundle for the group of that name.

        Raises:
            ResourceError: a bundle has no free slot; the message names the groups that hold its slots. Or as
                ``reserve`` does.
        """
        with self._reservation.lock:
            return self._lease(group, self.bundles(timeout))

    def _lease(self, group: str, bundles: list[Bundle]) -> SlotLease:
        full = [rank for rank, bundle in enumerate(bundles) if None not in bundle.holders]
        if full:
            holders = sorted({name for rank in full for name in bundles[rank].holders if name})
            fix = "Shut down one of these groups, or raise max_colocate_count"
            if running := self._reservation.running:
                fix = f"SIGKILL has not ended {running}: shut down its group, or the pool, again when it has ended"
            raise ResourceError(
                f"group {group!r} needs a slot in each of the {len(bundles)} bundles of pool {self.name_prefix!r}, "
                f"and {len(full)} of them have no free slot: max_colocate_count is {self.max_colocate_count}, and the "
                f"slots are taken by {', '.join(holders)}. {fix}",
                pool=self.name_prefix,
                max_colocate_count=self.max_colocate_count,
                holders=holders,
                running=running,
            )
        slots = [bundle.holders.index(None) for bundle in bundles]
        for bundle, slot in zip(bundles, slots, strict=True):
            bundle.holders[slot] = group
        return SlotLease(tuple(bundles), tuple(slots), self._reservation)

    @property
    def holders(self) -> list[str]:
        """The names of the groups that hold a slot of this pool."""
        bundles = self.bundles() if self._reservation.held else []
        return sorted({name for bundle in bundles for name in bundle.holders if name})

    def describe(self) -> str:
        """Return a table of the bundle of every rank, and the groups that hold its slots."""
        kind = "GPU" if self.use_gpu else "CPU"
        head = f"pool {self.name_prefix}: {self.world_size} {kind} bundle(s) x {self.max_colocate_count} slot(s)"
        if not self._reservation.held:
            return f"{head}, not reserved yet"
        titles = ["rank", "node", kind, *(f"slot {slot}" for slot in range(self.max_colocate_count))]
        rows = []
        for rank, bundle in enumerate(self.bundles()):
            device = bundle.gpu or str(bundle.local_rank)
            rows.append((str(rank), bundle.address, device, *(holder or "-" for holder in bundle.holders)))
        return f"{head}\n{table_text(titles, rows, max_rows=len(rows))}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name_prefix}: {self._store} x {self.max_colocate_count})"

    # ---- parts of pools --------------------------------------------------------------------------------------------

    def sub_pool(self, start: int, stop: int, name: str | None = None) -> RayResourcePool:
        """Return a pool of the bundles of ranks ``start`` to ``stop`` (excluded); it shares their slots.

        Reserves the pool, because only the cluster decides which ranks share a node.

        Raises:
            ResourceError: the pool does not have all of these ranks; or as ``reserve`` does.
        """
        if not 0 <= start < stop <= self.world_size:
            raise ResourceError(
                f"pool {self.name_prefix!r} has ranks 0 to {self.world_size - 1}; range({start!r}, {stop!r}) is not "
                "among them",
                start=start,
                stop=stop,
                world_size=self.world_size,
            )
        self.bundles()
        part = copy.copy(self)
        part.name_prefix = name or f"{self.name_prefix}[{start}:{stop}]"
        part._ranks = self._ranks[start:stop]
        part.bundles()
        return part

    def split(self, sizes: int | Sequence[int]) -> list[RayResourcePool]:
        """Return consecutive sub-pools of ``sizes`` bundles each.

        Args:
            sizes: size of each sub-pool, or one size for all of them; must add up to the size of this pool.

        Raises:
            ResourceError: the sizes do not add up, or one is not positive.
        """
        parts = [sizes] * (self.world_size // max(sizes, 1)) if isinstance(sizes, int) else sizes
        if min(parts, default=0) < 1 or sum(parts) != self.world_size:
            raise ResourceError(
                f"split({sizes!r}) of pool {self.name_prefix!r}, which has {self.world_size} bundles: expected one "
                "size that divides this number, or positive sizes that add up to it",
                sizes=sizes,
                world_size=self.world_size,
            )
        ends = list(itertools.accumulate(parts))
        return [self.sub_pool(end - count, end) for count, end in zip(parts, ends, strict=True)]

    def shares_bundles(self, other: RayResourcePool) -> bool:
        """Return whether a bundle of this pool is one of the other pool too."""
        left, right = self._ranks, other._ranks
        same = self._reservation is other._reservation
        return same and left.start < right.stop and right.start < left.stop


@dataclass(frozen=True, slots=True, eq=False)
class SlotLease:
    """The slots of one group.

    Attributes:
        bundles: the bundle of each rank.
        slots: index of the slot in it, by rank.
        reservation: the reservation that the bundles belong to.
    """

    bundles: tuple[Bundle, ...]
    slots: tuple[int, ...]
    reservation: Reservation

    def release(self) -> None:
        """Free the slots, and release the reservation if no group uses it any more. Call it once."""
        with self.reservation.lock:
            for bundle, slot in zip(self.bundles, self.slots, strict=True):
                bundle.holders[slot] = None
            self.reservation.processes.pop(self, None)
            self.reservation.release_if_unused()


@dataclass
class ResourcePoolManager:
    """The pools of a run, and the pool of each role, such as a ``trainer.Role``.

    Attributes:
        resource_pool_spec: number of processes on each node, by name of the pool.
        mapping: name of the pool of each role.
        use_gpu: whether the pools have GPUs.
        max_colocate_count: slots of each bundle, of all pools or by name of the pool; by default one for every role in
            the pool.
        isolate_gpus: whether each process sees only its own GPU; see ``RayResourcePool``.
        threads: threads that each process computes with on the CPU; see ``RayResourcePool``.
        logs: directory for the output of each rank; see ``RayResourcePool``.
        spare_bundles: more bundles on each node; see ``RayResourcePool``.
        resource_pool_dict: the pools by name, after ``create_resource_pool``.

    Raises:
        ConfigError: a role is mapped to a pool that ``resource_pool_spec`` does not have.
    """

    resource_pool_spec: Mapping[str, Sequence[int]]
    mapping: Mapping[Enum, str]
    use_gpu: bool = True
    max_colocate_count: int | Mapping[str, int] | None = None
    isolate_gpus: bool = field(default=False, kw_only=True)
    threads: int | None = field(default=None, kw_only=True)
    logs: str | os.PathLike[str] | None = field(default=None, kw_only=True)
    spare_bundles: int = field(default=0, kw_only=True)
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for role, name in self.mapping.items():
            if name not in self.resource_pool_spec:
                raise ConfigError(
                    f"{role} is mapped to pool {name!r}; the pools are {', '.join(self.resource_pool_spec)}",
                    key=str(role),
                    value=name,
                )

    def create_resource_pool(self) -> None:
        """Create every pool, after a check that the cluster has room for all of them together.

        Raises:
            ResourceError: the cluster is too small; the message lists the requested, existing and taken resources.
        """
        self.resource_pool_dict = {name: self._pool(name, nodes) for name, nodes in self.resource_pool_spec.items()}
        for name, pool in self.resource_pool_dict.items():
            pool.set_beside(other for key, other in self.resource_pool_dict.items() if key != name)
        if ray.is_initialized():
            check_fits(self.shapes(self.resource_pool_spec), ", ".join(self.resource_pool_dict))

    def shapes(self, spec: Mapping[str, Sequence[int]]) -> list[NodeShape]:
        """Return the resources that pools of these sizes need on each of their nodes."""
        return [shape for name, nodes in spec.items() if nodes for shape in self._pool(name, nodes).shapes]

    def _pool(self, name: str, nodes: Sequence[int]) -> RayResourcePool:
        return RayResourcePool(
            nodes,
            self.use_gpu,
            name,
            max_colocate_count=self.slots_of(name),
            isolate_gpus=self.isolate_gpus,
            threads=self.threads,
            logs=self.logs,
            spare_bundles=self.spare_bundles,
        )

    def get_resource_pool(self, role: Enum) -> RayResourcePool:
        """Return the pool of a role.

        Raises:
            ConfigError: the role is not mapped to a pool.
            ResourceError: the pools have not been created yet.
        """
        if role not in self.mapping:
            raise ConfigError(
                f"{role} is mapped to no pool; mapped are {', '.join(map(str, self.mapping))}", key=str(role)
            )
        if not self.resource_pool_dict:
            raise ResourceError("the pools have not been created: call create_resource_pool() first")
        return self.resource_pool_dict[self.mapping[role]]

    def slots_of(self, name: str) -> int:
        """Return the number of slots of each bundle of a pool."""
        given = self.max_colocate_count
        chosen = given.get(name) if isinstance(given, Mapping) else given
        return chosen or max(1, sum(pool == name for pool in self.mapping.values()))

    def get_n_slots(self) -> int:
        """Return the number of slots of all bundles together: the CPUs that the pools reserve."""
        return sum(self._bundles(nodes) * self.slots_of(name) for name, nodes in self.resource_pool_spec.items())

    def get_n_gpus(self) -> int:
        """Return the number of bundles of all pools together."""
        return sum(map(self._bundles, self.resource_pool_spec.values()))

    def _bundles(self, nodes: Sequence[int]) -> int:
        return sum(nodes) + len(nodes) * self.spare_bundles

    def shutdown(self) -> None:
        """Shut down all pools, even if one fails."""
        close_all("the pools", [(f"pool {name}", pool.shutdown) for name, pool in self.resource_pool_dict.items()])
