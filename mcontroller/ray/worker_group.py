"""RayWorkerGroup: a group whose ranks are processes in the slots of a pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

from mcontroller.errors import ConfigError
from mcontroller.group import WorkerGroup
from mcontroller.ray.class_with_init import RayClassWithInitArgs
from mcontroller.ray.colocate import Colocated
from mcontroller.ray.detached import attach, find
from mcontroller.ray.executor import RayExecutor
from mcontroller.ray.hosts import Hosts
from mcontroller.ray.launch import launch
from mcontroller.ray.resource_pool import RayResourcePool
from mcontroller.worker import W_co
from parallel_state.topology import Topology

__all__ = ["MegatronRayWorkerGroup", "RayWorkerGroup"]


class RayWorkerGroup(WorkerGroup[W_co]):
    """The workers of one role, one process on every place of ``resource_pool``, started when this is made.

    ``name_prefix`` is the group's role in every message, the worker class's name unless given. ``timeout`` (seconds)
    is the deadline of calls that set none; ``start_timeout`` that of the start. A ``detached`` group, on a detached
    pool, outlives its driver, and ``from_detached`` finds it again. ``shutdown``, a ``with`` block, or dropping the
    group ends the processes and frees their slots.

    Raises ResourceError where the pool or the cluster has no place; WorkerError, WorkerDied or CallTimeout where a
    rank does not come up.
    """

    resource_pool: RayResourcePool | None

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs[W_co],
        name_prefix: str | None = None,
        detached: bool = False,
        *,
        timeout: float | None = None,
        start_timeout: float | None = 600.0,
        topology: Topology | None = None,
    ) -> None:
        init = ray_cls_with_init
        name = name_prefix or init.default_name
        roles = init.roles_of(name)
        for each in roles.values():
            self._check(each.cls)
        hosts = launch(resource_pool, name, roles, options=init.options, detached=detached, timeout=start_timeout)
        try:
            self._join(hosts, name, init.cls, {role: each.cls for role, each in roles.items()}, timeout, topology)
            self.resource_pool = resource_pool
            if init.fused:
                self.fuse(roles)
        except BaseException:
            hosts.processes.end()
            raise

    @classmethod
    def _check(cls, worker_cls: type) -> None:
        """Raises ConfigError for a worker class that the group has no use for, before any process starts."""

    def _join(
        self,
        hosts: Hosts,
        name: str,
        worker_cls: type[Any],
        role_classes: dict[str, type],
        timeout: float | None,
        topology: Topology | None = None,
    ) -> None:
        self._hosts = hosts
        self._role_classes = role_classes
        self.resource_pool = None
        super().__init__(worker_cls, RayExecutor(hosts, name), name, timeout=timeout, topology=topology)

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        ray_cls_with_init: RayClassWithInitArgs[W_co] | None = None,
        *,
        timeout: float | None = None,
    ) -> Self:
        """The detached group ``name_prefix``, or that of these ``worker_names``, started by any driver.

        The worker class is the one the group was started with, unless another is given. Its ``shutdown`` ends the
        processes, and gives back the placement groups in which no other group is left.
        Raises ResourceError when there is no such group, or more than one.
        """
        if not name_prefix and not worker_names:
            raise ConfigError("give name_prefix or worker_names of the detached group", key="name_prefix")
        hosts, classes = attach(worker_names or find(str(name_prefix)))
        if len(classes) == 1 and ray_cls_with_init is not None:
            classes = dict.fromkeys(classes, ray_cls_with_init.cls)
        group = cls.__new__(cls)
        shown = next(iter(classes.values())) if len(classes) == 1 else Colocated.shown_as
        group._join(hosts, hosts.name, shown, classes, timeout)
        return group

    @property
    def worker_names(self) -> list[str]:
        """The name of every rank's process, by which another driver attaches to a detached group."""
        return self._hosts.processes.names

    # ---- several roles in one process ------------------------------------------------------------------------------

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, Self]:
        """A group for each of these roles of the same processes. Shutting one down ends the processes of all.

        Raises ConfigError for a role that the processes do not hold.
        """
        return {role: self._role(role) for role in prefix_set}

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Makes the group of each of these roles an attribute of this one.

        Raises ConfigError for a role that the processes do not hold, or whose name the group has for itself.
        """
        for role, group in self.spawn(prefix_set).items():
            if hasattr(type(self), role):
                raise ConfigError(f"role {role!r} has the name of a member of {type(self).__name__}", key=role)
            setattr(self, role, group)

    def _role(self, role: str) -> Self:
        if role not in self._role_classes:
            raise ConfigError(
                f"the processes of group {self.name} hold {', '.join(self._role_classes)}, not {role!r}",
                key=role,
                value=tuple(self._role_classes),
            )
        group = type(self).__new__(type(self))
        worker_cls = self._role_classes[role]
        group._join(self._hosts, role, worker_cls, {role: worker_cls}, self.timeout)
        group.resource_pool = self.resource_pool
        return group


class MegatronRayWorkerGroup(RayWorkerGroup[W_co]):
    """A RayWorkerGroup of Megatron workers: where its ranks stand is asked of Megatron itself, at the start.

    Raises ConfigError where the worker class cannot say it, and TopologyError where the ranks' answers are no full
    grid; the processes are ended then.
    """

    @classmethod
    def _check(cls, worker_cls: type) -> None:
        if not hasattr(worker_cls, "get_megatron_rank_info"):
            raise ConfigError(
                f"{worker_cls.__name__} has no get_megatron_rank_info: derive it from MegatronWorker, or use "
                "RayWorkerGroup",
                key="ray_cls_with_init",
                value=worker_cls.__name__,
            )

    def _join(
        self,
        hosts: Hosts,
        name: str,
        worker_cls: type[Any],
        role_classes: dict[str, type],
        timeout: float | None,
        topology: Topology | None = None,
    ) -> None:
        super()._join(hosts, name, worker_cls, role_classes, timeout, topology)
        if topology is None and hasattr(worker_cls, "get_megatron_rank_info"):
            self.collect_topology()

    @property
    def tp_size(self) -> int:
        return self.topology.size("tp")

    @property
    def pp_size(self) -> int:
        return self.topology.size("pp")

    @property
    def dp_size(self) -> int:
        return self.topology.size("dp")
