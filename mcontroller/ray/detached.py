"""Detached groups: found again by name from another driver, and ended by whoever ends them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from mcontroller.errors import ResourceError
from mcontroller.ray.hosts import Hosts, Processes
from mcontroller.ray.launch import NAMESPACE
from mcontroller.ray.wire import unpack

__all__ = ["attach", "find"]


def find(name: str) -> list[str]:
    """The process names of the detached group ``name``, in rank order.

    Raises ResourceError when there is none, or more than one.
    """
    names = [entry["name"] for entry in _listed()]
    groups = sorted({each.rsplit("/", 1)[0] for each in names})
    found = [group for group in groups if group.rsplit("/", 1)[0] == name]
    if len(found) != 1:
        what = "has no detached group" if not found else f"has {len(found)} detached groups"
        raise ResourceError(
            f"the cluster {what} named {name!r}; detached groups: {', '.join(groups) or 'none'}. Give the worker_names "
            "of the one that is meant",
            name=name,
            groups=groups,
        )
    mine = [each for each in names if each.rsplit("/", 1)[0] == found[0]]
    return sorted(mine, key=lambda each: int(each.rsplit("/", 1)[1]))


def attach(worker_names: Sequence[str]) -> tuple[Hosts, dict[str, type]]:
    """The processes of a detached group, by their names in rank order, and the class of each of their roles."""
    handles = [ray.get_actor(name, namespace=NAMESPACE) for name in worker_names]
    introductions = [handle.introduce.remote() for handle in handles]
    watches = [handle.watch.remote() for handle in handles]
    groups: list[PlacementGroup] = ray.get([handle.placement.remote() for handle in handles])
    places = AttachedPlaces(tuple({group.id: group for group in groups}.values()))
    processes = Processes(list(worker_names), handles, introductions, watches, places)
    hosts = Hosts(worker_names[0].rsplit("/", 2)[0], processes, detached=True)
    classes: Any = ray.get(handles[0].classes.remote())
    return hosts, {role: unpack(packed) for role, packed in classes.items()}


@dataclass(frozen=True, slots=True)
class AttachedPlaces:
    """The placement groups of a group whose pool belonged to another driver."""

    groups: tuple[PlacementGroup, ...]

    def leave(self) -> None:
        """Gives back the placement groups in which no other detached group sits."""
        others = [ray.get_actor(entry["name"], namespace=NAMESPACE) for entry in _listed()]
        placements: list[PlacementGroup] = ray.get([other.placement.remote() for other in others])
        used = {group.id for group in placements}
        for group in self.groups:
            if group.id not in used:
                remove_placement_group(group)


def _listed() -> list[dict[str, Any]]:
    return [entry for entry in ray.util.list_named_actors(all_namespaces=True) if entry["namespace"] == NAMESPACE]
