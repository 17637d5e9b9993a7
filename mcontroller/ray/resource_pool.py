"""Pools: places for processes in the cluster, and who sits in which of their slots."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from ray.util.placement_group import PlacementGroup

from mcontroller.errors import ResourceError
from mcontroller.ray.reservation import Bundle, NodeShape, Reservation

__all__ = ["RayResourcePool", "ResourcePool", "extract_pg_from_exist", "merge_resource_pool"]

_unnamed = itertools.count()


class ResourcePool:
    """How many processes stand on each node, and how many groups may share each place."""

    def __init__(self, process_on_nodes: Iterable[int] | None = None, max_colocate_count: int = 1) -> None:
        self._store = list(process_on_nodes or [])
        self.max_colocate_count = max_colocate_count
        if max_colocate_count < 1 or any(not isinstance(count, int) or count < 1 for count in self._store):
            raise ResourceError(
                f"process_on_nodes={self._store}, max_colocate_count={max_colocate_count}: every count must be a "
                "positive integer",
                process_on_nodes=self._store,
                max_colocate_count=max_colocate_count,
            )

    @property
    def store(self) -> list[int]:
        """The number of processes on each node, in the order given."""
        return self._store

    @property
    def world_size(self) -> int:
        return sum(self._store)

    def local_world_size_list(self) -> list[int]:
        """For every rank, the number of processes on its node."""
        return [count for count in self._store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """For every rank, its index on its node."""
        return [local for count in self._store for local in range(count)]


class RayResourcePool(ResourcePool):
    """GPUs, or CPU places, of a Ray cluster: ``process_on_nodes[i]`` processes side by side on the i-th node.

    Each place has ``max_colocate_count`` slots; a group takes one slot of every place it stands on, at
    ``1/max_colocate_count`` of its GPU. Nothing is reserved before the first group comes or ``reserve`` is called, and
    the cluster has it back when the last group has left or ``shutdown`` is called. Ranks are ordered by node address,
    then GPU index. ``accelerator_type`` restricts the pool to nodes with such GPUs; a ``detached`` pool stays when
    its driver ends.
    """

    def __init__(
        self,
        process_on_nodes: Iterable[int],
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 1,
        detached: bool = False,
        accelerator_type: str | None = None,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu = use_gpu
        self.name_prefix = name_prefix or f"pool{next(_unnamed)}"
        self.detached = detached
        self.accelerator_type = accelerator_type
        reservation = Reservation(self.shapes, max_colocate_count, self.name_prefix, detached)
        self._parts: tuple[_Part, ...] = (_Part(reservation, 0, self.world_size),)

    @property
    def shapes(self) -> list[NodeShape]:
        """What the pool asks of each of its nodes."""
        bundle: dict[str, float] = {"CPU": self.max_colocate_count}
        if self.use_gpu:
            bundle["GPU"] = 1
        if self.accelerator_type is not None:
            bundle[f"accelerator_type:{self.accelerator_type}"] = 0.001
        return [NodeShape(count, tuple(bundle.items())) for count in self._store]

    # ---- the places ------------------------------------------------------------------------------------------------

    def reserve(self, timeout: float = 10.0) -> Self:
        """Takes the places in the cluster now and keeps them until ``shutdown``, tenants or not.

        Raises ResourceError at once when the cluster is too small, and after ``timeout`` seconds when others hold it.
        """
        self.bundles(timeout)
        for part in self._parts:
            part.reservation.pinned = True
        return self

    def bundles(self, timeout: float = 10.0) -> list[Bundle]:
        """The place of every rank, in rank order, reserved if they are not yet; raises as ``reserve`` does."""
        found = [bundle for part in self._parts for bundle in part.bundles(timeout)]
        nodes = [(id(bundle.group), bundle.node) for bundle in found]
        self._store = [len(list(same)) for _, same in itertools.groupby(nodes)]
        return found

    def get_placement_groups(self) -> list[PlacementGroup]:
        """The placement groups behind the pool, one a node, in rank order; they stay reserved until ``shutdown``."""
        bundles = self.reserve().bundles()
        return list({bundle.group.id: bundle.group for bundle in bundles}.values())

    def shutdown(self) -> None:
        """Gives the places back to the cluster, and ends what still runs there; a second call does nothing."""
        for part in self._parts:
            part.reservation.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # ---- the slots -------------------------------------------------------------------------------------------------

    def occupy(self, tenant: str, timeout: float = 10.0) -> Tenancy:
        """Takes one slot of every place for the group ``tenant``.

        Raises ResourceError at once where every slot of a place is taken, naming who has them.
        """
        bundles = self.bundles(timeout)
        full = [rank for rank, bundle in enumerate(bundles) if None not in bundle.tenants]
        if full:
            tenants = sorted({name for rank in full for name in bundles[rank].tenants if name})
            raise ResourceError(
                f"group {tenant!r} needs a slot on each of the {len(bundles)} places of pool {self.name_prefix!r}, "
                f"and {len(full)} of them have none left: {self.max_colocate_count} slot(s) a place, taken by "
                f"{', '.join(tenants)}. Shut one of them down, or raise max_colocate_count",
                pool=self.name_prefix,
                max_colocate_count=self.max_colocate_count,
                tenants=tenants,
            )
        slots = [bundle.tenants.index(None) for bundle in bundles]
        for bundle, slot in zip(bundles, slots, strict=True):
            bundle.tenants[slot] = tenant
        return Tenancy(tuple(bundles), tuple(slots), tuple(part.reservation for part in self._parts))

    @property
    def tenants(self) -> list[str]:
        """The groups that have a slot in this pool, by name."""
        held = [part.bundles() for part in self._parts if part.reservation.held]
        return sorted({name for bundles in held for bundle in bundles for name in bundle.tenants if name})

    def describe(self) -> str:
        """A table for people: every rank's place, and who sits in its slots."""
        kind = "GPU" if self.use_gpu else "CPU"
        head = f"pool {self.name_prefix}: {self.world_size} {kind} place(s) x {self.max_colocate_count} slot(s)"
        if not all(part.reservation.held for part in self._parts):
            return f"{head}, not reserved yet"
        rows = [("rank", "node", kind, *(f"slot {slot}" for slot in range(self.max_colocate_count)))]
        for rank, bundle in enumerate(self.bundles()):
            device = bundle.local_rank if bundle.gpu is None else bundle.gpu
            rows.append((str(rank), bundle.address, str(device), *(tenant or "-" for tenant in bundle.tenants)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([head, *lines])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name_prefix}: {self._store} x {self.max_colocate_count})"

    # ---- parts of pools --------------------------------------------------------------------------------------------

    def sub_pool(self, start: int, stop: int, name: str | None = None) -> RayResourcePool:
        """The places of ranks ``start`` to ``stop`` as a pool of their own; their slots stay the same slots.

        Reserves the pool, since only the cluster says which ranks share a node.
        """
        if not 0 <= start < stop <= self.world_size:
            raise ResourceError(
                f"pool {self.name_prefix!r} has ranks 0 to {self.world_size - 1}; ranks {start} to {stop - 1} are not "
                "all among them",
                start=start,
                stop=stop,
                world_size=self.world_size,
            )
        self.bundles()
        parts, offset = [], 0
        for part in self._parts:
            low, high = max(start - offset, 0), min(stop - offset, len(part))
            if low < high:
                parts.append(_Part(part.reservation, part.start + low, part.start + high))
            offset += len(part)
        return self._looking_at(parts, name or f"{self.name_prefix}[{start}:{stop}]")

    def split(self, sizes: int | Sequence[int]) -> list[RayResourcePool]:
        """Consecutive sub-pools of ``sizes`` places, or all of one size; they must add up to this pool."""
        counts = [sizes] * (self.world_size // max(sizes, 1)) if isinstance(sizes, int) else list(sizes)
        if sum(counts) != self.world_size or any(count < 1 for count in counts):
            raise ResourceError(
                f"pool {self.name_prefix!r} has {self.world_size} places; split({sizes}) makes {sum(counts)}: the "
                "sizes must be positive and add up",
                sizes=sizes,
                world_size=self.world_size,
            )
        ends = list(itertools.accumulate(counts))
        return [self.sub_pool(end - count, end) for count, end in zip(counts, ends, strict=True)]

    def merge(self, *others: RayResourcePool) -> RayResourcePool:
        """One pool over the places of this one and the others, in this order."""
        for other in others:
            mine, theirs = self._kind(), other._kind()
            if mine != theirs:
                raise ResourceError(
                    f"pools {self.name_prefix!r} and {other.name_prefix!r} differ in kind, {mine} and {theirs}: only "
                    "pools of one kind can be merged",
                    kinds=(mine, theirs),
                )
        pools = (self, *others)
        parts = [part for pool in pools for part in pool._parts]
        _refuse_overlap(parts, [pool.name_prefix for pool in pools])
        return self._looking_at(parts, "_".join(pool.name_prefix for pool in pools))

    def _kind(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("use_gpu", "max_colocate_count", "detached", "accelerator_type")}

    def _looking_at(self, parts: Sequence[_Part], name: str) -> RayResourcePool:
        counts = [count for part in parts for count in part.counts()]
        pool = RayResourcePool(counts, name_prefix=name, **self._kind())  # type: ignore[arg-type]
        pool._parts = tuple(parts)
        return pool


@dataclass(frozen=True, slots=True)
class _Part:
    """Ranks ``start`` to ``stop`` of a reservation."""

    reservation: Reservation
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def bundles(self, timeout: float = 10.0) -> list[Bundle]:
        return self.reservation.bundles(timeout)[self.start : self.stop]

    def counts(self) -> list[int]:
        """Processes by node; as declared while nothing is reserved, which only a whole reservation can be."""
        if not self.reservation.held:
            return [shape.processes for shape in self.reservation.shapes]
        return [len(list(same)) for _, same in itertools.groupby(bundle.node for bundle in self.bundles())]


@dataclass(frozen=True, slots=True)
class Tenancy:
    """One group's slot on every place it stands on."""

    bundles: tuple[Bundle, ...]
    slots: tuple[int, ...]
    reservations: tuple[Reservation, ...]

    def leave(self) -> None:
        """Frees the slots, and the places where nobody is left; call it once."""
        for bundle, slot in zip(self.bundles, self.slots, strict=True):
            bundle.tenants[slot] = None
        for reservation in self.reservations:
            reservation.leave()


def _refuse_overlap(parts: Sequence[_Part], names: Sequence[str]) -> None:
    for left, right in itertools.combinations(parts, 2):
        if left.reservation is right.reservation and left.start < right.stop and right.start < left.stop:
            raise ResourceError(f"pools {', '.join(names)} share places: merge pools that share none", pools=names)


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> RayResourcePool:
    """One pool over the places of both; see ``RayResourcePool.merge``."""
    return rp1.merge(rp2)


def extract_pg_from_exist(
    resource_pools: Mapping[str, RayResourcePool], src_role_names: Sequence[str], resource_pool: RayResourcePool
) -> list[PlacementGroup]:
    """Placement groups, of the pools of the roles named, that have room for each node of ``resource_pool``, in order.

    Each placement group serves one node at most, the largest the largest. Raises ResourceError where they do not
    suffice.
    """
    sources = [pool for role, pool in resource_pools.items() if role in src_role_names]
    groups = [group for pool in sources for group in pool.get_placement_groups()]
    groups.sort(key=lambda group: group.bundle_count, reverse=True)
    wanted = sorted(enumerate(resource_pool.store), key=lambda node: node[1], reverse=True)
    counts = [group.bundle_count for group in groups]
    if len(counts) < len(wanted) or any(count < asked for count, (_, asked) in zip(counts, wanted, strict=False)):
        raise ResourceError(
            f"nodes of {resource_pool.store} processes are asked of {', '.join(src_role_names)}, "
            f"whose placement groups have {counts} places",
            asked=list(resource_pool.store),
            exists=counts,
        )
    chosen = {node: group for (node, _), group in zip(wanted, groups, strict=False)}
    return [chosen[node] for node in sorted(chosen)]
