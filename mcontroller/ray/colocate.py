"""Several roles in one process: each keeps its own class, methods and layout, and can reach the others' objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcontroller.errors import ConfigError
from mcontroller.ray.class_with_init import RayClassWithInitArgs
from mcontroller.ray.host import siblings

__all__ = ["Colocated", "create_colocated_worker_cls", "create_colocated_worker_cls_fused", "sibling"]


class Roles:
    """What a group of several roles shows as its worker class: it has no methods, its roles have them."""


class Colocated(RayClassWithInitArgs[Roles]):
    """Roles by name, to be made in the same processes; ``RayWorkerGroup`` takes it wherever it takes one class."""

    shown_as = Roles

    def __init__(self, class_dict: Mapping[str, RayClassWithInitArgs[Any]], fused: bool) -> None:
        super().__init__(Roles)
        self.roles = dict(class_dict)
        self.fused = fused
        if not self.roles:
            raise ConfigError("class_dict is empty: name at least one role", key="class_dict", value={})
        for role, init in self.roles.items():
            self._merge(role, init)

    @property
    def default_name(self) -> str:
        return "+".join(self.roles)

    def roles_of(self, name: str) -> Mapping[str, RayClassWithInitArgs[Any]]:
        return self.roles

    def _merge(self, role: str, init: RayClassWithInitArgs[Any]) -> None:
        for option, value in init.options.items():
            if self.options.setdefault(option, value) != value:
                raise ConfigError(
                    f"role {role!r} wants option {option}={value!r} for its process, a role beside it "
                    f"{self.options[option]!r}: roles of one process have the same options",
                    key=option,
                    value=value,
                )


def create_colocated_worker_cls(class_dict: Mapping[str, RayClassWithInitArgs[Any]]) -> Colocated:
    """One class for a group whose processes hold every role of ``class_dict``; ``group.spawn(roles)`` tells them apart.

    Raises ConfigError where two roles ask different options for the process that they share.
    """
    return Colocated(class_dict, fused=False)


def create_colocated_worker_cls_fused(class_dict: Mapping[str, RayClassWithInitArgs[Any]]) -> Colocated:
    """As ``create_colocated_worker_cls``, with each role an attribute of the group: ``group.actor.update(batch)``."""
    return Colocated(class_dict, fused=True)


def sibling(role: str) -> Any:
    """Inside a worker: the object of another role of the same process. KeyError names the roles that there are."""
    if role not in siblings:
        raise KeyError(f"no role {role!r} in this process; it holds {sorted(siblings)}")
    return siblings[role]
