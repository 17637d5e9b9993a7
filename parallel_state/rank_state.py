"""The one mechanism that swaps a rank's state: parts of the process's state, and sets of their values.

torch.distributed and Megatron keep the state of a rank in module globals, so a process is one rank of one layout. A
``StatePart`` reads and writes one piece of this state. A ``RankState`` is one set of values of several parts, and a
``StateSwitch`` exchanges the set that the process has now for another one. Three users share it: a ``MegatronContext``
is a layout's set, a mocked rank is a set that was never initialized, and a simulated rank is a set of everything that
a process has to itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, Protocol

from torch.distributed import distributed_c10d as c10d


class StatePart(Protocol):
    """One piece of the state of this process."""

    def fresh(self) -> Any:
        """Return the value of a new rank."""

    def read(self) -> Any:
        """Return the value that the process has now."""

    def write(self, value: Any) -> None:
        """Make ``value``, which ``fresh`` or ``read`` returned, the process's."""


class Attributes:
    """Attributes of a module, a class or another object; values are dicts by name.

    Args:
        owner: the object.
        names: the attributes; those that the object does not have are left out.
        fresh: returns the value of a new rank from the value that the process has when this part is made.
    """

    def __init__(self, owner: Any, names: Iterable[str], fresh: Callable[[Any], Any]) -> None:
        self.owner = owner
        self.names = tuple(name for name in names if hasattr(owner, name))
        self._fresh = fresh
        self._first = {name: fresh(value) for name, value in self.read().items()}

    def fresh(self) -> dict[str, Any]:
        """Return the values of a new rank by name."""
        return {name: self._fresh(value) for name, value in self._first.items()}

    def read(self) -> dict[str, Any]:
        """Return the values by name."""
        values = vars(self.owner)
        return {name: values[name] for name in self.names}

    def write(self, value: dict[str, Any]) -> None:
        """Set the attributes by name."""
        if isinstance(self.owner, ModuleType):
            vars(self.owner).update(value)
        else:
            for name, member in value.items():
                setattr(self.owner, name, member)


class StateValue:
    """A value behind two functions, such as a random state; a new rank starts with the process's.

    Args:
        read: returns the value.
        write: sets it.
    """

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], Any]) -> None:
        self.fresh = self.read = read
        self.write = write


class RankState:
    """One set of values of ``parts``.

    The values are those of a new rank until the first ``save``.

    Args:
        parts: the parts, in the order in which they are written. A part that is appended to them later has the value
            of a new rank.
    """

    def __init__(self, parts: Sequence[StatePart]) -> None:
        self.parts = parts
        self.values = [part.fresh() for part in parts]

    def save(self) -> None:
        """Replace the values by those that the process has now."""
        self.values = [part.read() for part in self.parts]

    def load(self) -> None:
        """Make the values the process's."""
        self.values += [part.fresh() for part in self.parts[len(self.values) :]]
        for part, value in zip(self.parts, self.values, strict=True):
            part.write(value)


class StateSwitch:
    """The set of values that the process has now, of several of the same parts.

    Args:
        parts: the parts.

    Attributes:
        active: the set that the process has now; at first, of code outside all blocks.
    """

    def __init__(self, parts: Sequence[StatePart]) -> None:
        self.active = RankState(parts)
        self._lock = threading.RLock()

    def to(self, state: RankState) -> None:
        """Save the active set, and make ``state`` the process's."""
        self.active.save()
        state.load()
        self.active = state

    @contextlib.contextmanager
    def activate(self, state: RankState) -> Iterator[None]:
        """Return a context manager in which ``state`` is the process's; the set before it is restored at exit.

        Blocks can be nested, of the same set and of others. Another thread that enters a block waits.
        """
        with self._lock:
            outer = self.active
            self.to(state)
            try:
                yield
            finally:
                self.to(outer)


def of_a_new_process(value: Any) -> Any:
    """Return the value of a global before anything is initialized: an empty container, False, 0 or None."""
    if isinstance(value, dict | list | set):
        return type(value)()
    return type(value)() if isinstance(value, bool | int) else None


def distributed_parts() -> list[Attributes]:
    """Return the parts of ``torch.distributed``: the default group, and what is registered for each group.

    A new rank has not initialized torch.distributed.
    """
    registries = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")
    counters = ("_group_count", "_backend", "_default_pg_init_method")
    return [
        Attributes(c10d, (*registries, *counters), of_a_new_process),
        Attributes(c10d._world, ("_default_pg", "_pg_coalesce_state", "_comms"), of_a_new_process),
    ]
