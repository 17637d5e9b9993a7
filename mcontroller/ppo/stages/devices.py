"""The groups of a run that share devices, and the memory that they hand to each other around the stages."""

from __future__ import annotations

from typing import Any

from mcontroller.errors import ConfigError
from mcontroller.group import GroupMethod, WorkerGroup
from mcontroller.ray.resource_pool import RayResourcePool

__all__ = ["OFFLOAD_CHOICES", "SharedDevices"]

OFFLOAD_CHOICES = ("auto", "always", "never")


class SharedDevices:
    """Hands the memory of devices from group to group.

    Before a call, every other group on the same devices offloads all its parts, and the called group those that the
    method does not need. The call brings back the parts that it needs: see ``workers.memory.offloader``.

    Args:
        offload: ``auto``: groups that share GPUs; ``always``: every group, on CPUs too; ``never``: none.
        communicators: whether groups that leave free the buffers of NCCL too.
    """

    def __init__(self, offload: str, communicators: bool = False) -> None:
        self.offload = offload
        self.communicators = communicators
        self._groups: dict[str, tuple[WorkerGroup[Any], RayResourcePool]] = {}
        self._pools: dict[str, RayResourcePool] = {}

    def add(self, group: WorkerGroup[Any], pool: RayResourcePool) -> None:
        """Add a group that runs in this pool; a group that cannot offload its parts keeps its memory.

        Raises:
            ConfigError: ``offload`` is ``always``, and the worker class has no registered method ``offload``.
        """
        self._pools[group.name] = pool
        can_offload = group.offers("offload")
        if self.offload == "always" and not can_offload:
            raise ConfigError(
                f"trainer.offload is 'always', but {group.worker_cls.__name__} of group {group.name!r} has no "
                "registered method offload(parts=None, keep_for=None): add one, or set trainer.offload=auto",
                key="trainer.offload",
                value="always",
            )
        if can_offload and (self.offload == "always" or (self.offload == "auto" and pool.use_gpu)):
            self._groups[group.name] = (group, pool)

    def neighbors(self, group: WorkerGroup[Any]) -> list[WorkerGroup[Any]]:
        """Return the other groups that hand memory to the group, and get memory from it."""
        if group.name not in self._groups:
            return []
        own = self._groups[group.name][1]
        others = [pair for name, pair in self._groups.items() if name != group.name]
        return [other for other, pool in others if pool.shares_bundles(own)]

    def are_shared(self, group: WorkerGroup[Any]) -> bool:
        """Return whether memory is handed over before calls of the group."""
        return bool(self.neighbors(group)) or (self.offload == "always" and group.name in self._groups)

    def compete(self, left: WorkerGroup[Any], right: WorkerGroup[Any]) -> bool:
        """Return whether calls of two groups must not run at the same time.

        They compete if they are one group, share GPUs, or hand memory to each other. Processes of several slots of a
        CPU pool do not compete.
        """
        if left.name == right.name:
            return True
        if left.name not in self._pools or right.name not in self._pools:
            return False
        if not self._pools[left.name].shares_bundles(self._pools[right.name]):
            return False
        return self._pools[left.name].use_gpu or {left.name, right.name} <= self._groups.keys()

    def make_room(self, method: GroupMethod[..., Any, Any]) -> None:
        """Free the memory that a call of this method does not need, on the devices of its group."""
        if not self.are_shared(method.group):
            return
        further = {"communicators": True} if self.communicators else {}
        leaving = [other.offload.options(blocking=False)(**further) for other in self.neighbors(method.group)]
        leaving.append(method.group.offload.options(blocking=False)(keep_for=method.name))
        for call in leaving:
            call.get()
