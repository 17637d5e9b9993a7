"""Start of a group: start all processes at once, then construct the workers in all of them."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from mcontroller.channel.address import ChannelKeys
from mcontroller.errors import CallTimeout, ConfigError, DataError, ResourceError
from mcontroller.ray.calls.executor import RayExecutor
from mcontroller.ray.calls.failures import RankFailure, RankLabel, first_cause
from mcontroller.ray.calls.supervision import GroupCall, GroupProcesses
from mcontroller.ray.detached import NAMESPACE, RecordedLease
from mcontroller.ray.process import Identity, ProcessInfo, WorkerProcess
from mcontroller.ray.process_handles import GroupState, ProcessHandles
from mcontroller.ray.reservation import Bundle
from mcontroller.ray.resource_pool import RayResourcePool, SlotLease
from mcontroller.ray.threads import threads_of_rank
from mcontroller.ray.values.handles import StoredValue
from mcontroller.ray.values.wire import Packed, pack
from mcontroller.ray.warm_start.executable import with_warm_start
from mcontroller.trace.recorder import recorder
from mcontroller.transport import Arguments
from mcontroller.worker import ClassWithInitArgs, RankEnvironment, Worker


def launch(
    pool: RayResourcePool,
    name: str,
    roles: Mapping[str, ClassWithInitArgs[Any]],
    *,
    options: Mapping[str, Any],
    detached: bool,
    timeout: float | None,
) -> GroupProcesses:
    """Start one process in every bundle of a pool and construct the workers in each of them.

    If it raises, nothing of the group is left.

    Args:
        pool: the pool.
        name: name of the group.
        roles: the worker classes with their init arguments, by role.
        options: Ray's options for the processes.
        detached: whether the group outlives this driver.
        timeout: deadline in seconds.

    Raises:
        ConfigError: a worker class or an init argument cannot be pickled.
        ResourceError: the pool has no free slot, or is not detached although the group is.
        GroupError: a worker's constructor raised, a process ended, or the start took longer than ``timeout``.
    """
    if not ray.is_initialized():
        raise ResourceError(f"group {name!r} needs a Ray cluster: call ray.init(...) before starting groups")
    if detached and not pool.detached:
        raise ResourceError(
            f"group {name!r} has detached=True, but pool {pool.name_prefix!r} ends with its driver, and ends every "
            "group in it: create the pool with detached=True",
            name=name,
            pool=pool.name_prefix,
        )
    packed = {role: _pack_init(init) for role, init in roles.items()}
    lease = pool.lease(name)
    unique = f"{name}/{uuid.uuid4().hex[:8]}"
    handles = ProcessHandles(lease.release, pool.channel)
    lease.reservation.processes[lease] = handles
    deadline = None if timeout is None else time.monotonic() + timeout
    recorded: RecordedLease | None = None
    try:
        if detached:
            recorded = RecordedLease(unique, lease, {role: init.cls for role, init in roles.items()})
            handles.release = recorded.release
        named = {name for init in roles.values() for name in getattr(init.cls, "warm_imports", ())}
        warm = set() if pool.use_gpu else {WorkerProcess.__module__, *named}
        reports = _start(handles, pool, lease, unique, options, detached, warm)
        handles.infos = _with_threads(pool, lease, _await_infos(reports, next(iter(packed)), lease, timeout))
        processes = GroupProcesses(name, handles, detached=detached)
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        _build(processes, pool, lease, roles.values(), packed, left).check()
        handles.enter(GroupState.READY)
        if recorded is not None:
            recorded.complete(handles)

        def launch_again(limit: float | None, lost: Collection[str]) -> GroupProcesses:
            pool.replace_lost(lost)
            return launch(pool, name, roles, options=options, detached=detached, timeout=limit)

        processes.launch_again = launch_again
    except BaseException:
        handles.end()
        raise
    return processes


def _pack_init(init: ClassWithInitArgs[Any]) -> Packed:
    """Serialize a worker class and its init arguments; raise ConfigError that names what cannot be pickled."""
    try:
        pack(init.cls, f"class {init.cls.__name__}")  # by itself first, for its name
        return pack((init.cls, Arguments(init.args, init.kwargs), init.imports))
    except DataError as error:
        raise ConfigError(f"{init.cls.__name__}: {error}", key=error.fields.get("location"), value=init.cls) from error


def _start(
    handles: ProcessHandles,
    pool: RayResourcePool,
    lease: SlotLease,
    unique: str,
    options: Mapping[str, Any],
    detached: bool,
    warm: Collection[str],
) -> list[Any]:
    """Start the processes; return a reference of the ``ProcessInfo`` of each."""
    share = {"num_cpus": 1, "num_gpus": pool.gpu_share, **options}
    common = with_warm_start(share, warm) if pool.warm_start else share
    keys = ChannelKeys.generate()
    for rank, bundle in enumerate(lease.bundles):
        name = f"{unique}/{rank}"
        named = {"name": name, "namespace": NAMESPACE, "lifetime": "detached"} if detached else {}
        chosen = {**common, **named, "scheduling_strategy": bundle.strategy}
        handles.names.append(name)
        handles.actors.append(_Actor.options(**chosen).remote(keys, handles.options))
    reports = [actor.get_info.remote() for actor in handles.actors]
    handles.watched.extend(actor.serve.remote() for actor in handles.actors)
    return reports


def _await_infos(reports: Sequence[Any], role: str, lease: SlotLease, timeout: float | None) -> list[ProcessInfo]:
    """Return where each process runs, as soon as all have reported it."""
    end = None if timeout is None else time.monotonic() + timeout
    late = list(reports)
    while late:
        ready, late = ray.wait(late, timeout=None if end is None else max(0.0, end - time.monotonic()))
        if not ready:
            ranks = tuple(reports.index(report) for report in late)
            late_on: dict[str, list[str]] = {}
            for rank in ranks:
                late_on.setdefault(lease.bundles[rank].address, []).append(str(rank))
            where = "; ".join(f"{', '.join(of_node)} on {node}" for node, of_node in late_on.items())
            raise CallTimeout(
                f"{role}.__init__ had no answer in {timeout:g} s: {len(late)} of {len(reports)} processes have not "
                f"started, of ranks {where}",
                role=role,
                method="__init__",
                timeout=timeout,
                ranks=ranks,
                stacks={},
                cause="",
                report="",
            )
        try:
            ray.get(ready)
        except RayError as error:
            rank = reports.index(ready[0])
            failed = RankLabel(role, rank, {}, None, lease.bundles[rank].address)
            raise first_cause([RankFailure(failed, "__init__", error)]) from None
    return ray.get(list(reports))


def _build(
    processes: GroupProcesses,
    pool: RayResourcePool,
    lease: SlotLease,
    inits: Iterable[ClassWithInitArgs[Any]],
    packed: Mapping[str, Packed],
    timeout: float | None,
) -> GroupCall:
    inline_bytes = processes.handles.options.inline_bytes
    large = sum(init.nbytes for init in packed.values()) > inline_bytes
    classes = StoredValue(ray.put(pack(packed))) if large else packed
    cuda = _cuda_variables(inits, processes.handles.infos) if pool.use_gpu else {}
    identities = _identities(pool, processes.name, lease, processes.handles.infos, cuda)
    if (trace := recorder()) is not None:
        lanes = [name.replace("/", "-") for name in processes.handles.names]
        pairs = zip(identities, lanes, strict=True)
        identities = (replace(identity, trace=(trace.directory, lane)) for identity, lane in pairs)
    arguments = {rank: Arguments((identity, classes)) for rank, identity in enumerate(identities)}
    executor = RayExecutor(processes, next(iter(packed)), of_process=True)
    return executor.submit("__init__", arguments, (), timeout=timeout)


def _with_threads(pool: RayResourcePool, lease: SlotLease, infos: Sequence[ProcessInfo]) -> list[ProcessInfo]:
    """Return the processes with the threads that each computes with, which depend on the processes of its node."""
    beside = [] if pool.use_gpu or pool.threads is not None else pool.bundles_beside()
    neighbors = Counter(bundle.address for bundle in (*lease.bundles, *beside))

    def threads(info: ProcessInfo, bundle: Bundle) -> int | None:
        return threads_of_rank(pool.threads, info.threads, info.cores, neighbors[bundle.address], pool.use_gpu)

    return [replace(info, threads=threads(info, at)) for info, at in zip(infos, lease.bundles, strict=True)]


def _cuda_variables(inits: Iterable[ClassWithInitArgs[Any]], infos: Sequence[ProcessInfo]) -> dict[str, str]:
    """Return the variables that the worker classes of a process ask for; they share its CUDA."""
    capability = min((info.capability for info in infos if info.capability is not None), default=None)
    variables: dict[str, str] = {}
    for init in inits:
        if issubclass(init.cls, Worker):
            variables |= init.cls.cuda_variables(capability, *init.args, **init.kwargs)
    return variables


def _identities(
    pool: RayResourcePool, name: str, lease: SlotLease, infos: Sequence[ProcessInfo], cuda: Mapping[str, str]
) -> Iterator[Identity]:
    """Yield the identity of every rank, with the variables that torchrun would set and the GPUs that it can see.

    LOCAL_RANK is the index of the rank's GPU among the GPUs that it can see: all of its group on its node, or only its
    own. A rank that sees only its own is alone on its node for torch: LOCAL_RANK is 0 and LOCAL_WORLD_SIZE is 1. Ranks
    of a pool without GPUs see none.
    """
    rendezvous = infos[0].node, infos[0].rendezvous_port
    ranks_of_node: dict[Any, list[int]] = {}
    for rank, bundle in enumerate(lease.bundles):
        ranks_of_node.setdefault(bundle.group.id, []).append(rank)
    for rank, bundle in enumerate(lease.bundles):
        neighbors = ranks_of_node[bundle.group.id]
        local_rank = neighbors.index(rank)
        ray_names = {"RAY_LOCAL_RANK": str(local_rank), "RAY_LOCAL_WORLD_SIZE": str(len(neighbors))}
        # Without GPUs the list is empty: Ray keeps the value of the node, or of the runtime_env, for such actors.
        gpus = [gpu for other in neighbors if (gpu := lease.bundles[other].gpu) is not None]
        device = local_rank if gpus else None
        environment = RankEnvironment(rank, pool.world_size, local_rank, len(neighbors), *rendezvous)
        if gpus and (pool.isolate_gpus or any(gpu.startswith("MIG-") for gpu in gpus)):
            gpus, device = gpus[local_rank : local_rank + 1], 0
            environment = replace(environment, local_rank=0, local_world_size=1)
        env = {**environment.variables(), **ray_names, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        yield Identity(name, rank, env, device, infos[rank].threads, cuda, pool.logs)


_Actor: Any = ray.remote(WorkerProcess)
"""Created once, because Ray keeps every actor class as long as the cluster exists."""
