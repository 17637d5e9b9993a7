"""The groups that ranks create, in which order, and the axes on which their members differ."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

from torch.distributed import distributed_c10d as c10d

from parallel_state.hangs.lines import AXIS_OF_DESCRIPTION, calling_line, members_text
from parallel_state.hangs.report import axes_of_group, rank_text
from parallel_state.simulated.calls import SharedGroup
from parallel_state.simulated.errors import CollectiveMismatch
from parallel_state.simulated.process_group import SimulatedGroup
from parallel_state.topology import Topology

_numbers = itertools.count()


class GroupRegistry:
    """All groups of a simulation.

    Every rank calls ``new_group`` for every group, members or not, in the same order. Only groups with
    ``use_local_synchronization=True`` are created by their members alone. In one call, ranks may create pairwise
    disjoint groups, each rank one that it is in. Processes can do so with groups of one rank; larger ones, of which a
    warning is given, write their addresses under the same keys of the store: on gloo all ranks but those of one wait.

    Args:
        world_size: the number of ranks.
        topology: the coordinates of the ranks; None if they are not known: then messages show those that ranks have in
            Megatron's groups, by the descriptions of these.
    """

    def __init__(self, world_size: int, topology: Topology | None) -> None:
        self._world = tuple(range(world_size))
        self._topology = topology
        self._groups: dict[int, dict[tuple[int, ...], SharedGroup]] = {}  # by the number of the call, by members
        self._local: dict[str, dict[tuple[int, ...], SharedGroup]] = {}  # by name, by members
        self._created = [0] * world_size
        self._members: list[list[SimulatedGroup]] = [[] for _ in range(world_size)]
        self._prefix = f"simulation {next(_numbers)}"

    def describe(self, rank: int) -> str:
        """Return a rank with its index on every axis of more than one rank."""
        if self._topology is not None:
            axes = [axis for axis in self._topology.dense_axes if self._topology.size(axis) > 1]
            return rank_text(rank, {axis: self._topology.coordinates(rank)[axis] for axis in axes})
        groups = [group.shared for group in self._members[rank]]
        named = {AXIS_OF_DESCRIPTION[member.description]: member.ranks for member in groups
                 if member.description in AXIS_OF_DESCRIPTION}  # fmt: skip
        axes = [axis for axis in ("tp", "cp", "dp", "pp") if len(named.get(axis, ())) > 1]
        return rank_text(rank, {axis: named[axis].index(rank) for axis in axes})

    def create(self, rank: int, ranks: tuple[int, ...], name: str, description: str) -> SharedGroup:
        """Return the group that a rank creates next.

        Raises:
            CollectiveMismatch: another rank created another group at this point.
        """
        members = ranks or self._world
        if not name.isdecimal():  # a hash: created by its members alone
            of_call = self._local.setdefault(name, {})
        else:
            number = self._created[rank]
            self._created[rank] += 1
            of_call = self._groups.setdefault(number, {})
            others = [other for ranks, other in of_call.items() if ranks != members]
            other = next((candidate for candidate in others if not _are_apart(candidate, members, rank)), None)
            if other is not None:
                raise CollectiveMismatch(
                    f"call {number} of new_group has different ranks: all ranks create all groups in the same order, "
                    f"or disjoint ones that they are in\n\n{self.describe(other.creator)}: "
                    f"new_group({members_text(other.ranks)}) {other.description}"
                    f"\n    at {other.line}\n{self.describe(rank)}: new_group({members_text(members)}) {description}"
                    f"\n    at {calling_line()}",
                    ranks=(other.creator, rank),
                )
            if members not in of_call and any(len(candidate.ranks) > 1 for candidate in others):
                warnings.warn(_sharing_text(number, others[0].ranks, members), RuntimeWarning, stacklevel=4)
        group = of_call.get(members)
        if group is None:
            axis = self._axis_of(members, description)
            group = of_call[members] = SharedGroup(name, description, members, rank, calling_line(), axis)
        group.created_by.add(rank)
        return group

    def skip(self, rank: int) -> None:
        """Count a group that a rank is no member of as created, and do not compare its ranks."""
        self._created[rank] += 1

    def unique_name(self, rank: int) -> str:
        """Return a name for the next group of a rank that no other group of this process has."""
        return f"{self._prefix}, rank {rank}, group {len(self._members[rank])}"

    def register(self, group: SimulatedGroup, backend: str, store: Any) -> None:
        """Register a group in torch.distributed's state of the running rank, and for functional collectives."""
        name = group.shared.name
        self._members[group.global_rank].append(group)
        c10d._world.pg_map[group] = (backend, store)
        c10d._world.pg_names[group] = _group_name(name)
        c10d._world.pg_backend_config[group] = f"cpu:{backend}"
        c10d._world.tags_to_pg.setdefault("", []).append(group)
        c10d._world.tags_to_pg.setdefault(f"ptd:{name}", []).append(group)
        c10d._world.pg_to_tag[group] = f"ptd:{name}"
        c10d._register_process_group(_group_name(group.group_name), group)

    def unregister(self, rank: int) -> None:
        """Unregister the groups of one rank."""
        for group in self._members[rank]:
            c10d._unregister_process_group(_group_name(group.group_name))
        self._members[rank].clear()

    def forget(self, rank: int) -> None:
        """Unregister the groups of one rank, and forget its last calls, which have tensors."""
        for group in self._members[rank]:
            group.shared.last_calls.pop(rank, None)
        self.unregister(rank)

    def close(self) -> None:
        """Unregister all groups."""
        for rank in self._world:
            self.unregister(rank)

    def unequal_counts(self, running: Sequence[int]) -> tuple[str, tuple[int, ...]] | None:
        """Return a message and the ranks that it names, if running ranks called ``new_group`` unequally often."""
        most = max(self._created)
        fewer = tuple(rank for rank in running if self._created[rank] < most)
        if not fewer:
            return None
        group = next(iter(self._groups[self._created[fewer[0]]].values()))
        return (
            f"{self.describe(fewer[0])} called new_group {self._created[fewer[0]]} times, and rank {group.creator} "
            f"{most} times: all ranks create all groups\n\n{self.describe(group.creator)}: new_group("
            f"{members_text(group.ranks)}) {group.description}\n    at {group.line}\n    not called on ranks "
            f"{members_text(fewer)}",
            (*fewer, group.creator),
        )

    def _axis_of(self, ranks: Sequence[int], description: str) -> str:
        if self._topology is None or len(ranks) == 1:
            return AXIS_OF_DESCRIPTION.get(description, "")
        return axes_of_group([self._topology.coordinates(rank) for rank in ranks], description)


def _are_apart(group: SharedGroup, members: tuple[int, ...], rank: int) -> bool:
    """Whether two groups of one call are disjoint, and every rank is in that which it creates."""
    return rank in members and group.created_by <= set(group.ranks) and not set(group.ranks) & set(members)


def _sharing_text(number: int, first: tuple[int, ...], second: tuple[int, ...]) -> str:
    lists = f"{members_text(first)} and {members_text(second)}"
    return (
        f"call {number} of new_group creates {lists} at {calling_line()}: over gloo, processes of one of them wait for "
        "ever, because both have one name; create all groups on all ranks, or pass use_local_synchronization=True"
    )


def _group_name(name: str) -> Any:
    """Return a name in the type that torch 2.13 has for names of groups."""
    return name
