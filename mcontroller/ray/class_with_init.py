"""RayClassWithInitArgs: a worker class with its init arguments and Ray options; several of them in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, Self

from ray.actor import ActorClass

from mcontroller.errors import ConfigError
from mcontroller.worker import ClassWithInitArgs, W_co

P = ParamSpec("P")

RESERVED_OPTIONS = frozenset(
    {"num_cpus", "num_gpus", "scheduling_strategy", "name", "namespace", "lifetime"}
    | {"max_concurrency", "concurrency_groups", "max_restarts", "max_task_retries"}
)
"""Options that the pool and the group set for every process. Calls run one at a time on the main thread of a process,
and a process that Ray restarts would have no worker in it."""


class RayClassWithInitArgs(ClassWithInitArgs[W_co]):
    """A worker class and its init arguments; every process of a group makes one object of it.

    Args:
        cls: the worker class, plain or decorated with ``ray.remote``.
        args: positional arguments of the class.
        kwargs: keyword arguments of the class.

    Raises:
        ConfigError: ``cls`` is not a class.
    """

    fused: bool = False
    """Whether a group of several roles has an attribute for each of them."""

    def __init__(self, cls: Callable[P, W_co], *args: P.args, **kwargs: P.kwargs) -> None:
        super().__init__(plain_class(cls), *args, **kwargs)
        self.options: dict[str, Any] = {}

    @property
    def default_name(self) -> str:
        """The name of a group without ``name_prefix``."""
        return self.cls.__name__

    def roles_of(self, name: str) -> Mapping[str, RayClassWithInitArgs[Any]]:
        """Return the classes that a group called ``name`` has in each of its processes, by role."""
        return {name: self}

    def update_options(self, options: dict[str, Any]) -> Self:
        """Add Ray actor options for the processes (``runtime_env``, ``resources``, ...), and return this object.

        Raises:
            ConfigError: an option is set by the pool or the group (``RESERVED_OPTIONS``).
        """
        reserved = sorted(RESERVED_OPTIONS.intersection(options))
        if reserved:
            raise ConfigError(
                f"option(s) {', '.join(reserved)} of {self.cls.__name__}'s processes are set by the pool and the group:"
                " leave them out",
                key=reserved[0],
                value=options[reserved[0]],
            )
        self.options.update(options)
        return self


def check_class_with_init(init: Any, name: str = "ray_cls_with_init") -> None:
    """Raise ConfigError, which shows how to wrap a bare class, unless ``init`` is a RayClassWithInitArgs.

    Args:
        init: an argument.
        name: of the argument, or of the role that it is for.
    """
    if isinstance(init, RayClassWithInitArgs):
        return
    cls = plain_class(init.cls if isinstance(init, ClassWithInitArgs) else init)
    shown = cls.__name__ if isinstance(cls, type) else "WorkerClass"
    raise ConfigError(
        f"{name} is {init!r}; expected RayClassWithInitArgs({shown}), with the init arguments of the class behind it",
        key=name,
        value=init,
    )


def plain_class(cls: Any) -> Any:
    """Return the class that was decorated with ``ray.remote``; Ray keeps it on the subclass made for the actor."""
    if not isinstance(cls, ActorClass):
        return cls
    metadata: Any = cls.__ray_metadata__  # type: ignore[attr-defined]
    return metadata.modified_class.__ray_actor_class__


class Roles:
    """The worker class of a group with several roles. It has no methods; the worker class of each role has."""


class Colocated(RayClassWithInitArgs[Roles]):
    """Several roles for the same processes. ``RayWorkerGroup`` accepts it like a single class."""

    def __init__(self, class_dict: Mapping[str, RayClassWithInitArgs[Any]], fused: bool) -> None:
        super().__init__(Roles)
        if not isinstance(class_dict, Mapping) or not class_dict:
            raise ConfigError(
                f"class_dict is {class_dict!r}; expected a dict of at least one role, as "
                "{'actor': RayClassWithInitArgs(Actor)}",
                key="class_dict",
                value=class_dict,
            )
        self.roles = dict(class_dict)
        self.fused = fused
        for role, init in self.roles.items():
            check_class_with_init(init, role)
            self._merge_options(role, init)

    @property
    def default_name(self) -> str:
        """The names of the roles, joined by ``+``."""
        return "+".join(self.roles)

    def roles_of(self, name: str) -> Mapping[str, RayClassWithInitArgs[Any]]:
        """Return the classes by role."""
        return self.roles

    def _merge_options(self, role: str, init: RayClassWithInitArgs[Any]) -> None:
        for option, value in init.options.items():
            if self.options.setdefault(option, value) != value:
                raise ConfigError(
                    f"role {role!r} asks for option {option}={value!r} of its process, and another role of the process "
                    f"asks for {self.options[option]!r}: roles of one process have the same options",
                    key=option,
                    value=value,
                )


def create_colocated_worker_cls(class_dict: Mapping[str, RayClassWithInitArgs[Any]]) -> Colocated:
    """Return one class for a group whose processes run every role of ``class_dict``.

    ``group.spawn(roles)`` returns a group for each role.

    Raises:
        ConfigError: two roles ask for different options of their process, or there is no role.
    """
    return Colocated(class_dict, fused=False)


def create_colocated_worker_cls_fused(class_dict: Mapping[str, RayClassWithInitArgs[Any]]) -> Colocated:
    """Return one class as ``create_colocated_worker_cls`` does; the group has an attribute for each role.

    Examples:
        >>> group = RayWorkerGroup(pool, create_colocated_worker_cls_fused({"actor": ..., "critic": ...}))
        >>> group.actor.update_actor(batch)
    """
    return Colocated(class_dict, fused=True)
