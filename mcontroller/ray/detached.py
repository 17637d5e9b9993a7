"""Detached groups: what the cluster keeps of them, by which another driver finds them again, and their end.

A group's entry is in the key-value store of Ray's head node, so that it is read however busy the group's processes are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

import ray
from ray import cloudpickle
from ray.experimental import internal_kv
from ray.util.placement_group import PlacementGroup, remove_placement_group

from mcontroller.errors import ResourceError
from mcontroller.ray.host import HostInfo
from mcontroller.ray.hosts import Hosts, Processes
from mcontroller.ray.resource_pool import Tenancy

__all__ = ["NAMESPACE", "Announced", "attach", "find"]

NAMESPACE = "mcontroller"
"""Ray's namespace for the processes of detached groups, where other drivers look for them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A group's placement groups, the class of each role, and where its ranks run: nowhere, until its start is over.

    ``job`` is Ray's name for the driver that starts it.
    """

    placements: Set[PlacementGroup]
    classes: dict[str, type]
    job: str
    infos: tuple[HostInfo, ...] = ()


class Announced:
    """The places of a detached group in the driver that starts it; the group's entry stands as long as they are held.

    ``group`` is what the names of its processes begin with.
    """

    def __init__(self, group: str, tenancy: Tenancy, classes: Mapping[str, type]) -> None:
        self._group = group
        self._tenancy = tenancy
        self._entry = Entry(frozenset(bundle.group for bundle in tenancy.bundles), dict(classes), _job())
        _write(group, self._entry)

    def ready(self, processes: Processes) -> None:
        """Says where the processes run, now that they do."""
        infos = tuple(info for info in processes.infos(timeout=None) if info is not None)
        _write(self._group, replace(self._entry, infos=infos))

    def leave(self) -> None:
        _delete(self._group)
        self._tenancy.leave()


def find(name: str) -> list[str]:
    """The process names of the detached group ``name``, in rank order.

    Raises ResourceError when there is none, or more than one.
    """
    names = _process_names()
    groups = sorted(set(map(_group_of, names)))
    found = [group for group in groups if group.rsplit("/", 1)[0] == name]
    if len(found) != 1:
        what = "has no detached group" if not found else f"has {len(found)} detached groups"
        raise ResourceError(
            f"the cluster {what} named {name!r}; detached groups: {', '.join(groups) or 'none'}. Give the worker_names "
            "of the one that is meant",
            name=name,
            groups=groups,
        )
    mine = [each for each in names if _group_of(each) == found[0]]
    return sorted(mine, key=_rank_of)


def attach(worker_names: Sequence[str]) -> tuple[Hosts, dict[str, type]]:
    """The processes of a detached group, by their names in rank order, and the class of each of their roles.

    Raises ResourceError where one of them is not there, or their start is not over; where it never will be, since its
    driver has ended, the group is ended first.
    """
    missing = sorted(set(worker_names) - set(_process_names()))
    group = _group_of(worker_names[0])
    entry = _read(group)
    if entry is not None and not entry.infos and _has_ended(entry.job):
        _end(group, entry)
        raise ResourceError(
            f"the driver of group {group} ended before the group's start was over: its processes have been ended, "
            "start it again",
            name=group,
            missing=missing,
        )
    if missing or entry is None or not entry.infos:
        why = f"has no process named {', '.join(missing)}" if missing else f"is still starting group {group}"
        raise ResourceError(f"the cluster {why}", name=group, missing=missing)
    handles = [ray.get_actor(name, namespace=NAMESPACE) for name in worker_names]
    introductions = [ray.put(entry.infos[_rank_of(name)]) for name in worker_names]
    places = _Attached(group, entry.placements)
    processes = Processes(list(worker_names), handles, introductions, places)
    return Hosts(worker_names[0].rsplit("/", 2)[0], processes, detached=True), entry.classes


@dataclass(frozen=True, slots=True)
class _Attached:
    """The places of a group whose pool belonged to another driver."""

    group: str
    placements: Set[PlacementGroup]

    def leave(self) -> None:
        """Gives back the placement groups in which no other detached group sits."""
        _delete(self.group)
        entries = [_read(other) for other in set(map(_group_of, _process_names())) - {self.group}]
        used = {placement for entry in entries if entry is not None for placement in entry.placements}
        for placement in self.placements - used:
            remove_placement_group(placement)


def _end(group: str, entry: Entry) -> None:
    for name in _process_names():
        if _group_of(name) == group:
            ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    _Attached(group, entry.placements).leave()


def _job() -> str:
    return ray.get_runtime_context().get_job_id()


def _has_ended(job: str) -> bool:
    from ray._private.state import jobs  # the public list of jobs is the dashboard's, which may not run

    return any(each["JobID"] == job and each["IsDead"] for each in jobs())


def _process_names() -> list[str]:
    listed = ray.util.list_named_actors(all_namespaces=True)
    return [each["name"] for each in listed if each["namespace"] == NAMESPACE]


def _group_of(process: str) -> str:
    return process.rsplit("/", 1)[0]


def _rank_of(process: str) -> int:
    return int(process.rsplit("/", 1)[1])


def _write(group: str, entry: Entry) -> None:
    internal_kv._internal_kv_put(group, cloudpickle.dumps(entry), namespace=NAMESPACE)


def _read(group: str) -> Entry | None:
    kept = internal_kv._internal_kv_get(group, namespace=NAMESPACE)
    return None if kept is None else cloudpickle.loads(kept)


def _delete(group: str) -> None:
    internal_kv._internal_kv_del(group, namespace=NAMESPACE)
