"""The start of a group: every process at once, and none waited for before all are on their way."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray

from mcontroller.errors import ResourceError
from mcontroller.ray.detached import NAMESPACE, Announced
from mcontroller.ray.host import Identity, WorkerHost
from mcontroller.ray.hosts import Flight, Hosts, Processes
from mcontroller.ray.resource_pool import RayResourcePool, Tenancy
from mcontroller.ray.wire import pack
from mcontroller.worker import ClassWithInitArgs, RankEnvironment

__all__ = ["launch"]


def launch(
    pool: RayResourcePool,
    name: str,
    roles: Mapping[str, ClassWithInitArgs[Any]],
    *,
    options: Mapping[str, Any],
    detached: bool,
    timeout: float | None,
) -> Hosts:
    """Starts one process on every place of ``pool`` and constructs the workers of ``roles`` in each of them.

    Raises ResourceError where the pool has no slot, or ends with its driver and the group shall not; WorkerError,
    WorkerDied or CallTimeout (after ``timeout`` seconds) where a rank does not come up, and leaves nothing of the group
    then.
    """
    if not ray.is_initialized():
        raise ResourceError(f"group {name!r} needs a Ray cluster: call ray.init(...) before starting groups")
    if detached and not pool.detached:
        raise ResourceError(
            f"group {name!r} is to outlive its driver, and pool {pool.name_prefix!r} would not, nor what runs in it: "
            "make the pool with detached=True",
            name=name,
            pool=pool.name_prefix,
        )
    tenancy = pool.occupy(name)
    unique = f"{name}/{uuid.uuid4().hex[:8]}"
    processes = Processes([], [], [], tenancy)
    announced: Announced | None = None
    try:
        if detached:
            announced = Announced(unique, tenancy, {role: init.cls for role, init in roles.items()})
            processes.places = announced
        _start(processes, pool, tenancy, unique, options, detached)
        hosts = Hosts(name, processes, detached=detached)
        flight = _build(hosts, pool, tenancy, roles, timeout)
        hosts.depart(flight)
        with _progress(name, flight.refs) as show:
            show(hosts, flight)
            hosts.settle(flight)
        if announced is not None:
            announced.ready(processes)
    except BaseException:
        processes.end()
        raise
    return hosts


def _start(
    processes: Processes,
    pool: RayResourcePool,
    tenancy: Tenancy,
    unique: str,
    options: Mapping[str, Any],
    detached: bool,
) -> None:
    share = {"num_cpus": 1, "num_gpus": 1 / pool.max_colocate_count if pool.use_gpu else 0}
    for rank, bundle in enumerate(tenancy.bundles):
        name = f"{unique}/{rank}"
        named = {"name": name, "namespace": NAMESPACE, "lifetime": "detached"} if detached else {}
        chosen = {**share, **named, **options, "scheduling_strategy": bundle.strategy}
        processes.names.append(name)
        processes.handles.append(_Actor.options(**chosen).remote())
    processes.introductions.extend(handle.introduce.remote() for handle in processes.handles)


def _build(
    hosts: Hosts,
    pool: RayResourcePool,
    tenancy: Tenancy,
    roles: Mapping[str, ClassWithInitArgs[Any]],
    timeout: float | None,
) -> Flight:
    handles = hosts.processes.handles
    endpoint = handles[0].reserve_endpoint.remote()
    packed = [pack((init.cls, init.args, init.kwargs)).as_argument() for init in roles.values()]
    index = {role: position for position, role in enumerate(roles)}
    refs = [
        handle.build.remote(identity, endpoint, index, *packed)
        for handle, identity in zip(handles, _identities(pool, hosts.name, tenancy), strict=True)
    ]
    first_role = next(iter(roles))
    return Flight(first_role, "__init__", tuple(range(len(handles))), refs, timeout)


def _identities(pool: RayResourcePool, name: str, tenancy: Tenancy) -> Iterator[Identity]:
    """Every rank's variables as torchrun would set them, local ranks counting the visible GPUs of a node.

    Ranks of a pool without GPUs can see none.
    """
    locals_ = zip(pool.local_rank_list(), pool.local_world_size_list(), strict=True)
    for rank, (bundle, (local_rank, local_size)) in enumerate(zip(tenancy.bundles, locals_, strict=True)):
        environment = RankEnvironment(rank, pool.world_size, local_rank, local_size)
        env = {**environment.variables(), "RAY_LOCAL_RANK": str(local_rank), "RAY_LOCAL_WORLD_SIZE": str(local_size)}
        if not pool.use_gpu:
            env["CUDA_VISIBLE_DEVICES"] = ""  # Ray leaves the node's own, or the runtime_env's, to actors without GPUs
            yield Identity(name, rank, env)
            continue
        mine = [other.gpu for other in tenancy.bundles if other.group.id == bundle.group.id]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, mine))
        yield Identity(name, rank, env, local_rank)


_Actor: Any = ray.remote(WorkerHost)
"""Made once: Ray keeps every class that it was given for as long as the cluster stands."""


@contextmanager
def _progress(name: str, refs: list[Any]) -> Iterator[Any]:
    """A bar of the ranks that are up, where someone is looking at a terminal."""
    if not sys.stderr.isatty():
        yield lambda hosts, flight: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"starting {name}", total=len(refs))

        def show(hosts: Hosts, flight: Flight) -> None:
            waiting = list(refs)
            while waiting and not hosts.wait(flight, 0.2):
                waiting = ray.wait(refs, num_returns=len(refs), timeout=0)[1]
                bar.update(task, completed=len(refs) - len(waiting))

        yield show
