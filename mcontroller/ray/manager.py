"""Roles and the pools they live in: one pool for all, or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import ray

from mcontroller.errors import ConfigError, ResourceError
from mcontroller.ray.reservation import check_fits
from mcontroller.ray.resource_pool import RayResourcePool

__all__ = ["ResourcePoolManager", "Role"]


class Role(Enum):
    """The parts that models play in training by reinforcement."""

    Actor = auto()
    Rollout = auto()
    ActorRollout = auto()
    Critic = auto()
    RefPolicy = auto()
    RewardModel = auto()
    ActorRolloutRef = auto()


@dataclass
class ResourcePoolManager:
    """Makes the pools of ``resource_pool_spec`` (name -> processes on each node) and says which one a role lives in.

    ``max_colocate_count`` is the number of slots on each place; unless given, a pool has one for every role in it.
    Raises ConfigError for a role mapped to a pool that is not specified.
    """

    resource_pool_spec: Mapping[str, Sequence[int]]
    mapping: Mapping[Role, str]
    use_gpu: bool = True
    max_colocate_count: int | None = None
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for role, name in self.mapping.items():
            if name not in self.resource_pool_spec:
                raise ConfigError(
                    f"{role} is mapped to pool {name!r}; the pools are {', '.join(self.resource_pool_spec)}",
                    key=str(role),
                    value=name,
                )

    def create_resource_pool(self) -> None:
        """Makes every pool, after checking that the cluster has room for all of them together.

        Raises ResourceError with what was asked, what exists and what is taken.
        """
        self.resource_pool_dict = {name: self._pool(name) for name in self.resource_pool_spec}
        if ray.is_initialized():
            shapes = [shape for pool in self.resource_pool_dict.values() for shape in pool.shapes]
            check_fits(shapes, ", ".join(self.resource_pool_dict))

    def _pool(self, name: str) -> RayResourcePool:
        roles = sum(pool == name for pool in self.mapping.values())
        slots = self.max_colocate_count or max(1, roles)
        return RayResourcePool(self.resource_pool_spec[name], self.use_gpu, name, max_colocate_count=slots)

    def get_resource_pool(self, role: Role) -> RayResourcePool:
        """The pool of a role. Raises ConfigError for an unmapped one, ResourceError before the pools are made."""
        if role not in self.mapping:
            raise ConfigError(
                f"{role} is mapped to no pool; mapped are {', '.join(map(str, self.mapping))}", key=str(role)
            )
        if not self.resource_pool_dict:
            raise ResourceError("the pools have not been made: call create_resource_pool() first")
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """The number of places in all pools together."""
        return sum(sum(nodes) for nodes in self.resource_pool_spec.values())

    def shutdown(self) -> None:
        """Gives all places back to the cluster."""
        for pool in self.resource_pool_dict.values():
            pool.shutdown()
