"""Worker: what a rank knows about itself, and the delayed construction of its object."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from mcontroller.dispatch.modes import Dispatch, Execute
from mcontroller.dispatch.registration import register
from mcontroller.errors import ConfigError

__all__ = ["ClassWithInitArgs", "RankEnvironment", "Worker"]

W = TypeVar("W")


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """What torch's rendezvous wants to know of a rank, in the variables that torchrun sets too.

    A group sets them before it makes the worker; in a process that no group started, this is rank 0 of 1.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    def variables(self) -> dict[str, str]:
        """As environment variables: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT."""
        return {name.upper(): str(getattr(self, name)) for name in self.__slots__}

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> Self:
        """What the variables say, with the defaults for those that are not set."""
        known = {name: variables[name.upper()] for name in cls.__slots__ if name.upper() in variables}
        return cls(**{name: value if name == "master_addr" else int(value) for name, value in known.items()})  # type: ignore[arg-type]


class Worker:
    """The base of a role's object on one rank. A subclass may, and need not, call ``super().__init__()``."""

    _environment: RankEnvironment

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        worker = super().__new__(cls)
        worker._environment = RankEnvironment.from_variables(os.environ)
        return worker

    @property
    def rank(self) -> int:
        """The rank of this worker in its group."""
        return self._environment.rank

    @property
    def world_size(self) -> int:
        """How many ranks its group has."""
        return self._environment.world_size

    @property
    def local_rank(self) -> int:
        """The index of this worker among those of its group on its node."""
        return self._environment.local_rank

    @property
    def local_world_size(self) -> int:
        """How many ranks of its group are on its node."""
        return self._environment.local_world_size

    def get_master_addr_port(self) -> tuple[str, int]:
        """Where rank 0 listens for the rendezvous of the group."""
        return self._environment.master_addr, self._environment.master_port

    def call_context(self, method: str) -> AbstractContextManager[Any]:
        """Return a context manager in which every call through the group runs; the default does nothing.

        Args:
            method: the name of the called method.
        """
        return nullcontext()

    def before_shutdown(self) -> None:
        """Called on every rank when its group is shut down: finish what is under way. By default nothing is.

        Not called where the group ends otherwise: it is broken, a call has not answered, nobody holds it any more.
        """

    @classmethod
    def check_init(cls, *args: Any, **kwargs: Any) -> None:
        """Reject wrong arguments of the constructor before any process starts; by default accept all.

        Called in the controller's process, with the arguments of ``RayClassWithInitArgs``, when that is made.

        Raises:
            ConfigError: an argument does not fit.
        """

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``func(worker, *args, **kwargs)`` on every rank, with the rows of DataProtos split over the ranks."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``func(*args, **kwargs)`` on rank 0, and its value."""
        return func(*args, **kwargs)


class ClassWithInitArgs(Generic[W]):
    """A worker class and what to make it with; the object is made where the call of this is."""

    def __init__(self, cls: type[W], *args: Any, **kwargs: Any) -> None:
        if not isinstance(cls, type):
            raise ConfigError(
                f"{type(self).__name__} was given {cls!r}; expected the worker class first, then its arguments",
                key="cls",
                value=cls,
            )
        if issubclass(cls, Worker):
            cls.check_init(*args, **kwargs)
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> W:
        return self.cls(*self.args, **self.kwargs)

    def __repr__(self) -> str:
        given = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return f"{type(self).__name__}({', '.join([self.cls.__qualname__, *given])})"
