"""RayClassWithInitArgs: a worker class, what to make it with, and what its process asks of Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, Self

from ray.actor import ActorClass

from mcontroller.errors import ConfigError
from mcontroller.worker import ClassWithInitArgs, W_co

__all__ = ["RayClassWithInitArgs"]

P = ParamSpec("P")

OWN_OPTIONS = frozenset(
    {"num_cpus", "num_gpus", "scheduling_strategy", "name", "namespace", "lifetime"}
    | {"max_concurrency", "concurrency_groups", "max_restarts", "max_task_retries"}
)
"""What the pool and the group decide for every process; calls are run one at a time, on its main thread, and a process
that Ray started again would have no worker in it."""


class RayClassWithInitArgs(ClassWithInitArgs[W_co]):
    """A worker class, plain or made an actor by ``ray.remote``, whose object is made in every process of a group."""

    def __init__(self, cls: Callable[P, W_co], *args: P.args, **kwargs: P.kwargs) -> None:
        super().__init__(_plain(cls), *args, **kwargs)
        self.options: dict[str, Any] = {}

    fused: bool = False
    """Whether a group of several roles shows each as an attribute of its own."""

    @property
    def default_name(self) -> str:
        """The name of a group that is given none."""
        return self.cls.__name__

    def roles_of(self, name: str) -> Mapping[str, RayClassWithInitArgs[Any]]:
        """What a group called ``name`` makes in each of its processes, by role."""
        return {name: self}

    def update_options(self, options: dict[str, Any]) -> Self:
        """Adds Ray actor options for the processes (``runtime_env``, ``resources``, ...).

        Raises ConfigError for those that the pool decides: the share of a GPU, the place, the name, the threads,
        and that a process that dies ends its group.
        """
        refused = sorted(OWN_OPTIONS.intersection(options))
        if refused:
            raise ConfigError(
                f"option(s) {', '.join(refused)} of {self.cls.__name__}'s processes are set by the pool and the group: "
                "leave them out",
                key=refused[0],
                value=options[refused[0]],
            )
        self.options.update(options)
        return self


def _plain(cls: Any) -> Any:
    """The class that ``ray.remote`` was given; Ray keeps it on the subclass that it makes for the actor."""
    if not isinstance(cls, ActorClass):
        return cls
    metadata: Any = cls.__ray_metadata__  # type: ignore[attr-defined]
    return metadata.modified_class.__ray_actor_class__
