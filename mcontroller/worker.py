"""Worker, the object of one rank, and ClassWithInitArgs, a worker class with the arguments to construct it later."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Self

from typing_extensions import TypeVar  # with defaults, which typing has from Python 3.13

from mcontroller.dispatch.modes import Dispatch, Execute
from mcontroller.dispatch.registration import register
from mcontroller.errors import ConfigError
from mcontroller.transport import stored_value

P = ParamSpec("P")
R = TypeVar("R")
W_co = TypeVar("W_co", covariant=True, default=Any)
"""The worker class of a group; ``WorkerGroup`` alone means ``WorkerGroup[Any]``."""


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """The variables of torch's rendezvous for one rank, the same that torchrun sets.

    A group sets them before it constructs the worker. The defaults are rank 0 of 1, for a process that no group
    started.

    Attributes:
        rank: the rank in the group.
        world_size: the number of ranks of the group.
        local_rank: the index among the group's ranks on the node.
        local_world_size: the number of the group's ranks on the node.
        master_addr: the address of the rendezvous, on the node of rank 0.
        master_port: the port of the rendezvous.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    def variables(self) -> dict[str, str]:
        """Return the environment variables RANK, WORLD_SIZE, LOCAL_RANK, ..., MASTER_PORT."""
        return {name.upper(): str(getattr(self, name)) for name in self.__slots__}

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Set this process's environment variables to these while the block runs."""
        variables = self.variables()
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> Self:
        """Read the environment variables; fields whose variable is not set keep their defaults."""
        known = {name: variables[name.upper()] for name in cls.__slots__ if name.upper() in variables}
        return cls(**{name: value if name == "master_addr" else int(value) for name, value in known.items()})  # type: ignore[arg-type]


class Worker:
    """The base class of workers: one object per rank. Subclasses need not call ``super().__init__()``."""

    warm_imports: ClassVar[Sequence[str]] = ()
    """Modules that take long to import, and start no threads: processes without GPUs are forked from one that has
    imported them, if the pool's ``warm_start`` allows it."""
    _environment: RankEnvironment

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create the worker and record its rank, so that ``__init__`` can read it."""
        worker = super().__new__(cls)
        worker._environment = RankEnvironment.from_variables(os.environ)
        return worker

    def __init__(self) -> None:
        super().__init__()

    @property
    def rank(self) -> int:
        """The rank of this worker in its group."""
        return self._environment.rank

    @property
    def world_size(self) -> int:
        """The number of ranks of its group."""
        return self._environment.world_size

    @property
    def local_rank(self) -> int:
        """The index of this worker among the workers of its group on its node."""
        return self._environment.local_rank

    @property
    def local_world_size(self) -> int:
        """How many ranks of its group are on its node."""
        return self._environment.local_world_size

    def get_master_addr_port(self) -> tuple[str, int]:
        """Return the address and port of the group's rendezvous, on the node of rank 0."""
        return self._environment.master_addr, self._environment.master_port

    def call_context(self, method: str) -> AbstractContextManager[Any]:
        """Return a context manager in which every call through the group runs; the default does nothing.

        Args:
            method: the name of the called method.
        """
        return nullcontext()

    def before_shutdown(self) -> None:
        """Finish pending work. Every rank runs this when its group is shut down; by default it does nothing.

        It does not run if the group ends in another way: it is broken, a call has not returned, or the group object
        was garbage-collected.
        """

    @classmethod
    def check_init(cls, *args: Any, **kwargs: Any) -> None:
        """Reject wrong arguments of the constructor before any process starts; by default accept all.

        Called in the controller's process, with the arguments of ``ClassWithInitArgs``, when that is constructed.

        Raises:
            ConfigError: an argument is not valid.
        """

    @classmethod
    def cuda_variables(cls, capability: tuple[int, int] | None, *args: Any, **kwargs: Any) -> dict[str, str]:
        """Return environment variables that CUDA reads when a process first uses it; by default none.

        A process of a group sets them before it chooses its GPU. Variables that are set already stay.

        Args:
            capability: compute capability of the GPUs; None if it is unknown.
            args: positional arguments of the constructor.
            kwargs: keyword arguments of the constructor.
        """
        return {}

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``func(*args, **kwargs)`` on rank 0."""
        return func(*args, **kwargs)


def delegate(attribute: str, method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return a method of a worker that calls ``method`` of the object in its attribute, registered as ``method`` is.

    If ``method`` is not registered, the base class of the worker registers it, as for any override.

    Args:
        attribute: the attribute of the worker with the object.
        method: a method of the object's class.

    Examples:
        >>> class Trained(Worker):
        ...     save = delegate("checkpointer", Checkpointer.save)
        ...
        ...     def __init__(self, path: str) -> None:
        ...         self.checkpointer = Checkpointer(path)
    """
    name = method.__name__

    @functools.wraps(method)
    def delegated(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = getattr(getattr(self, attribute), name)(*args, **kwargs)
        return result

    # A call compares its arguments with this before it sends them.
    delegated.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    return delegated


class ClassWithInitArgs(Generic[W_co]):
    """A worker class and the arguments to construct it with; calling this object constructs a worker.

    Args:
        cls: the worker class.
        args: positional arguments of its ``__init__``. References of Ray are replaced by their values.
        kwargs: keyword arguments of its ``__init__``, likewise; type checkers compare them with its signature.

    Attributes:
        imports: modules, or files that end in .py, that a process imports before it makes the object.

    Raises:
        ConfigError: ``cls`` is not a class, or its constructor does not take these arguments.
    """

    def __init__(self, cls: Callable[P, W_co], *args: P.args, **kwargs: P.kwargs) -> None:
        if not isinstance(cls, type):
            raise ConfigError(
                f"{type(self).__name__} got {cls!r}; expected the worker class first, then its arguments",
                key="cls",
                value=cls,
            )
        values = tuple(map(stored_value, args))
        named = {name: stored_value(value) for name, value in kwargs.items()}
        plain: Any = cls
        if inspect.isfunction(plain.__init__):
            signature = inspect.signature(plain.__init__)
            try:
                signature.bind(None, *values, **named)
            except TypeError as error:
                names = ", ".join(list(signature.parameters)[1:]) or "none"
                raise ConfigError(f"{cls.__name__}: {error}; its arguments: {names}", key=cls.__name__) from error
        if issubclass(cls, Worker):
            cls.check_init(*values, **named)
        self.cls: type[W_co] = cls
        self.args = values
        self.kwargs = named
        self.imports: tuple[str, ...] = ()

    def __call__(self) -> W_co:
        """Construct the worker."""
        return self.cls(*self.args, **self.kwargs)

    def __repr__(self) -> str:
        arguments = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return f"{type(self).__name__}({', '.join([self.cls.__qualname__, *arguments])})"
