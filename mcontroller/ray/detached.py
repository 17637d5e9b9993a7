"""Detached groups: the record of each in the cluster, how another driver finds it, and how it is ended.

The record is in the key-value store of Ray's head node, so that it can be read even if all processes are busy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

import ray
from ray import cloudpickle
from ray.experimental import internal_kv
from ray.util.placement_group import PlacementGroup, remove_placement_group

from mcontroller.channel.options import ChannelOptions
from mcontroller.errors import ResourceError
from mcontroller.ray.calls.supervision import GroupProcesses
from mcontroller.ray.process import ProcessInfo
from mcontroller.ray.process_handles import GroupState, ProcessHandles
from mcontroller.ray.resource_pool import SlotLease

NAMESPACE = "mcontroller"
"""Ray's namespace for the processes of detached groups, where other drivers look for them."""

NOT_DETACHED = "has ended, or was started without detached=True on a RayResourcePool(..., detached=True)"


@dataclass(frozen=True, slots=True)
class DetachedRecord:
    """The record of a detached group in the cluster.

    Attributes:
        placements: its placement groups.
        classes: the worker class of each role.
        job: Ray's id of the driver that starts it.
        infos: where its ranks run, with the keys of its channel; empty until its start is complete.
        options: settings of its channel.
    """

    placements: Set[PlacementGroup]
    classes: dict[str, type]
    job: str
    infos: tuple[ProcessInfo, ...] = ()
    options: ChannelOptions | None = None


class RecordedLease:
    """The slots of a detached group, in the driver that starts it. Its record exists as long as the lease.

    Args:
        group: the prefix of the names of its processes.
        lease: the slots.
        classes: the worker class of each role.
    """

    def __init__(self, group: str, lease: SlotLease, classes: Mapping[str, type]) -> None:
        self._group = group
        self._lease = lease
        self._record = DetachedRecord(frozenset(bundle.group for bundle in lease.bundles), dict(classes), _job())
        _write(group, self._record)

    def complete(self, handles: ProcessHandles) -> None:
        """Add the process infos to the record, when the start of the group is complete."""
        _write(self._group, replace(self._record, infos=tuple(handles.infos), options=handles.options))

    def release(self) -> None:
        """Delete the record and free the slots."""
        _delete(self._group)
        self._lease.release()


def find(name: str) -> str:
    """Return the prefix of the process names of the detached group ``name``.

    Raises:
        ResourceError: there is no such group, or more than one.
    """
    groups = sorted(set(map(group_of, _process_names())))
    matching = [group for group in groups if group.rsplit("/", 1)[0] == name]
    if len(matching) != 1:
        count = "has no detached group" if not matching else f"has {len(matching)} detached groups"
        fix = f"It {NOT_DETACHED}" if not matching else "Pass the worker_names of one of them"
        raise ResourceError(
            f"the cluster {count} named {name!r}; detached groups: {', '.join(groups) or 'none'}. {fix}",
            name=name,
            groups=groups,
        )
    return matching[0]


def attach(group: str, worker_names: Sequence[str] = ()) -> tuple[GroupProcesses, dict[str, type]]:
    """Return the processes of a detached group, in rank order, and the worker class of each of its roles.

    Args:
        group: the prefix of the names of its processes.
        worker_names: names of its processes, which must be all of them, in any order; empty for those in its record.

    Raises:
        ResourceError: a process does not exist, or the start of the group is not complete. If its driver ended during
            the start, or a process has ended, the group is ended first.
    """
    record, running = _read(group), set(_process_names())
    names = [f"{group}/{rank}" for rank in range(len(record.infos))] if record is not None else []
    died = [name for name in names if name not in running]
    if record is not None and (died or (not names and _has_ended(record.job))):
        _end(group, record)
        why = f"{', '.join(died)} died" if died else "its driver ended before its start was complete"
        text = f"the processes of group {group} have been ended, because {why}: start it again"
        raise ResourceError(text, name=group, missing=died)
    missing = sorted(set(worker_names) - running)
    if missing:
        text = f"the cluster has no detached process named {', '.join(missing)}: the group {NOT_DETACHED}"
        raise ResourceError(text, name=group, missing=missing)
    if record is None or not names:
        raise ResourceError(f"the cluster is still starting group {group}: try again", name=group)
    if worker_names and sorted(worker_names) != sorted(names):
        text = f"worker_names are {', '.join(worker_names)}; expected all processes of one group: {', '.join(names)}"
        raise ResourceError(text, name=group, expected=names)
    actors = [ray.get_actor(name, namespace=NAMESPACE) for name in names]
    handles = ProcessHandles(
        partial(_remove, group, record.placements),
        record.options or ChannelOptions(),
        names,
        actors,
        [actor.get_info.remote() for actor in actors],  # behind ``serve``, which does not end
        list(record.infos),
    )
    handles.enter(GroupState.READY)
    return GroupProcesses(group.rsplit("/", 1)[0], handles, detached=True), record.classes


def _remove(group: str, placements: Set[PlacementGroup]) -> None:
    """Delete the record, and remove the placement groups that no other detached group uses."""
    _delete(group)
    records = [_read(other) for other in set(map(group_of, _process_names())) - {group}]
    used = {placement for record in records if record is not None for placement in record.placements}
    for placement in placements - used:
        remove_placement_group(placement)


def _end(group: str, record: DetachedRecord) -> None:
    for name in _process_names():
        if group_of(name) == group:
            ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    _remove(group, record.placements)


def _job() -> str:
    return ray.get_runtime_context().get_job_id()


def _has_ended(job: str) -> bool:
    from ray._private.state import jobs  # the public list of jobs is the dashboard's, which may not run

    return any(entry["JobID"] == job and entry["IsDead"] for entry in jobs())


def _process_names() -> list[str]:
    listed = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in listed if actor["namespace"] == NAMESPACE]


def group_of(process: str) -> str:
    """Return the prefix of the names of the processes of a group, from the name of one of them."""
    return process.rsplit("/", 1)[0]


def _write(group: str, record: DetachedRecord) -> None:
    internal_kv._internal_kv_put(group, cloudpickle.dumps(record), namespace=NAMESPACE)


def _read(group: str) -> DetachedRecord | None:
    stored = internal_kv._internal_kv_get(group, namespace=NAMESPACE)
    record: DetachedRecord | None = None if stored is None else cloudpickle.loads(stored)
    return record


def _delete(group: str) -> None:
    internal_kv._internal_kv_del(group, namespace=NAMESPACE)
