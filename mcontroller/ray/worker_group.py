"""RayWorkerGroup: a group whose ranks are processes in the slots of a pool."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence, Set
from typing import Any, Self

from mcontroller.dispatch.registration import check_timeout
from mcontroller.errors import ConfigError, ResourceError
from mcontroller.group import WorkerGroup
from mcontroller.locality import locality_lines
from mcontroller.ray.calls.executor import RayExecutor
from mcontroller.ray.calls.supervision import GroupProcesses
from mcontroller.ray.class_with_init import RayClassWithInitArgs, Roles, check_class_with_init
from mcontroller.ray.detached import attach, find, group_of
from mcontroller.ray.launch import launch
from mcontroller.ray.resource_pool import RayResourcePool
from mcontroller.worker import W_co
from parallel_state.topology import Topology

_logger = logging.getLogger(__name__)


class RayWorkerGroup(WorkerGroup[W_co]):
    """The workers of one role: one process in every bundle of a pool.

    The constructor starts the processes. ``shutdown``, a ``with`` block, or dropping the group ends them and frees
    their slots.

    Args:
        resource_pool: the pool.
        ray_cls_with_init: the worker class with its init arguments, or several (``create_colocated_worker_cls``).
        name_prefix: the role, as error messages name it; by default the name of the worker class.
        detached: whether the group outlives this driver; another driver finds it with ``from_detached``. The pool must
            be detached too.
        timeout: deadline in seconds of calls that set none; None for no deadline.
        start_timeout: deadline in seconds of the start.
        topology: the coordinates of the ranks, for workers that do not report their own.

    Raises:
        ConfigError: ``ray_cls_with_init`` is a bare class, or an init argument cannot be pickled.
        DispatchError: a deadline is not above 0.
        ResourceError: the pool is of another type or has no free slot, or the cluster is too small.
        GroupError: a worker's constructor raised, a process ended, or the start took longer than ``start_timeout``.
    """

    executor: RayExecutor
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
        check_class_with_init(ray_cls_with_init)
        check_timeout(timeout)
        check_timeout(start_timeout)
        if not isinstance(resource_pool, RayResourcePool):
            raise ResourceError(
                f"resource_pool is {resource_pool!r}; expected a RayResourcePool, as RayResourcePool([4])"
            )
        init = ray_cls_with_init
        name = name_prefix or init.default_name
        roles = init.roles_of(name)
        for role_init in roles.values():
            self._check(role_init.cls)
        processes = launch(resource_pool, name, roles, options=init.options, detached=detached, timeout=start_timeout)
        try:
            classes = {role: role_init.cls for role, role_init in roles.items()}
            self._join(processes, name, init.cls, classes, timeout, topology)
            self.resource_pool = resource_pool
            if init.fused:
                self.fuse(roles)
        except BaseException:
            processes.handles.end()
            raise

    @classmethod
    def _check(cls, worker_cls: type) -> None:
        """Raise ConfigError for a worker class that the group cannot run, before any process starts."""

    def _join(
        self,
        processes: GroupProcesses,
        name: str,
        worker_cls: type[Any],
        role_classes: dict[str, type],
        timeout: float | None,
        topology: Topology | None = None,
    ) -> None:
        self._role_classes = role_classes
        self.resource_pool = None
        super().__init__(worker_cls, RayExecutor(processes, name), name, timeout=timeout, topology=topology)

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        ray_cls_with_init: RayClassWithInitArgs[W_co] | None = None,
        *,
        timeout: float | None = None,
    ) -> Self:
        """Return a detached group that was started by any driver.

        Its ``shutdown`` ends the processes, and removes the placement groups that no other group uses.

        Args:
            name_prefix: name of the group.
            worker_names: names of all its processes, if several groups have the same name.
            ray_cls_with_init: a worker class to use instead of the one that the group was started with.
            timeout: deadline in seconds of calls that set none.

        Raises:
            ConfigError: both ``name_prefix`` and ``worker_names`` are None.
            ResourceError: there is no such group, or more than one; or a process of it has ended, and so have all then.
        """
        if not name_prefix and not worker_names:
            raise ConfigError("pass name_prefix or worker_names of the detached group", key="name_prefix")
        prefix = group_of(worker_names[0]) if worker_names else find(str(name_prefix))
        processes, classes = attach(prefix, worker_names or ())
        if len(classes) == 1 and ray_cls_with_init is not None:
            check_class_with_init(ray_cls_with_init)
            classes = dict.fromkeys(classes, ray_cls_with_init.cls)
        group = cls.__new__(cls)
        worker_cls = next(iter(classes.values())) if len(classes) == 1 else Roles
        group._join(processes, processes.name, worker_cls, classes, timeout)
        return group

    @property
    def _processes(self) -> GroupProcesses:
        return self.executor.processes

    @property
    def worker_names(self) -> list[str]:
        """The name of every rank's process, with which another driver can find a detached group."""
        return self._processes.handles.names

    @property
    def node_ids(self) -> list[str]:
        """Ray's id of the node of every rank, by rank."""
        return [info.node_id for info in self._processes.handles.infos]

    @property
    def lost_nodes(self) -> Set[str]:
        """Ray's ids of the nodes that the group has lost, also those whose loss Ray has not noticed yet."""
        return self._processes.handles.gone

    def fail_stuck_calls(self, seconds: float) -> None:
        """Report calls that run for so many seconds from now on, and fail those whose ranks wait for each other."""
        self._processes.report_after, self._processes.fail_stuck = seconds, True

    # ---- several roles in one process ------------------------------------------------------------------------------

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, Self]:
        """Return a group for each of these roles. They share the processes: shutting one down ends all of them.

        Raises:
            ConfigError: the processes do not have one of the roles.
        """
        return {role: self._role(role) for role in prefix_set}

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Add the group of each of these roles as an attribute.

        Raises:
            ConfigError: the processes do not have one of the roles, or its name is an attribute of every group.
        """
        for role, group in self.spawn(prefix_set).items():
            if hasattr(type(self), role):
                raise ConfigError(
                    f"role {role!r} has the name of an attribute of {type(self).__name__}: rename the role", key=role
                )
            setattr(self, role, group)

    def _role(self, role: str) -> Self:
        if role not in self._role_classes:
            raise ConfigError(
                f"the processes of group {self.name} have the roles {', '.join(self._role_classes)}, not {role!r}",
                key=role,
                value=tuple(self._role_classes),
            )
        group = type(self).__new__(type(self))
        worker_cls = self._role_classes[role]
        group._join(self._processes, role, worker_cls, {role: worker_cls}, self.timeout)
        group.resource_pool = self.resource_pool
        return group


class MegatronRayWorkerGroup(RayWorkerGroup[W_co]):
    """A RayWorkerGroup of Megatron workers, which collects the topology from Megatron at the start.

    It logs a warning if tp, cp, ep or etp crosses nodes.

    Args: see ``RayWorkerGroup``.

    Raises:
        ConfigError: the worker class has no ``get_megatron_rank_info``.
        TopologyError: the coordinates that the ranks report do not form a full grid; the processes are ended.
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
        processes: GroupProcesses,
        name: str,
        worker_cls: type[Any],
        role_classes: dict[str, type],
        timeout: float | None,
        topology: Topology | None = None,
    ) -> None:
        reported = name in processes.coordinates  # by another group of the same role
        super()._join(processes, name, worker_cls, role_classes, timeout, topology)
        if topology is None and hasattr(worker_cls, "get_megatron_rank_info"):
            lines = locality_lines(self.collect_topology())
            if lines and not reported:
                _logger.warning("group %s: %s", self.name, ". ".join(lines))
