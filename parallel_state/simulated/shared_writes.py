"""What ranks write into module globals and class attributes that all ranks of the process share."""

from __future__ import annotations

import os
import sys
import sysconfig
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import is_
from pathlib import Path
from typing import Any

from parallel_state.rank_state import Attributes, StatePart
from parallel_state.simulated.errors import SharedStateWarning

_PACKAGES = ("parallel_state", "mcontroller", "workers", "trainer")
_NOT_OF_A_USER = (
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(str(Path(__file__).parents[2] / name) + os.sep for name in _PACKAGES),
)
_ALSO = ("torch.distributed", "torch.distributed.distributed_c10d")
_MISSING = object()


class SharedWrites:
    """The names that ranks rebind in the user's modules and classes, and in torch.distributed.

    Seen are the modules that the functions of the ranks reach, through their globals, when another rank goes on.

    Args:
        is_own: whether every rank has a module to itself, by its name.
        parts: the state that every rank has to itself.
    """

    def __init__(self, is_own: Callable[[str], bool], parts: Sequence[StatePart]) -> None:
        self._is_own, self._parts = is_own, parts
        self._values: dict[Any, dict[str, Any]] = {}
        self._writers: dict[tuple[str, str], set[int]] = {}
        self._not_shared: set[tuple[Any, str]] = set()
        self._ranks = 0

    def start(self, functions: Iterable[Callable[[], Any]]) -> None:
        """Note the values before a run of functions."""
        given = list(functions)
        self._writers.clear()
        self._ranks = len(given)
        owners = dict.fromkeys(owner for function in given for owner in _reached(function, self._is_own))
        owners |= {sys.modules[name]: None for name in _ALSO}
        self._values = {owner: dict(vars(owner)) for owner in owners} if self._ranks > 1 else {}
        self._not_shared = {
            (part.owner, name) for part in self._parts if isinstance(part, Attributes) and part.owner in owners
            for name in part.names
        }  # fmt: skip

    def see(self, rank: int | None) -> None:
        """Note what a rank has rebound since the last call."""
        for owner, before in self._values.items():
            now = vars(owner)
            if len(now) == len(before) and all(map(is_, chain(now, now.values()), chain(before, before.values()))):
                continue
            changed = [name for name, value in now.items() if before.get(name, _MISSING) is not value]
            removed = [name for name in before if name not in now]
            self._values[owner] = dict(now)
            if rank is not None:
                for name in (
                    changed_name
                    for changed_name in (*changed, *removed)
                    if (owner, changed_name) not in self._not_shared
                ):
                    self._writers.setdefault((_name(owner), name), set()).add(rank)

    def report(self) -> None:
        """Warn of what some ranks have rebound."""
        writers = list(self._writers.items())
        if not writers:
            return
        shown = "; ".join(f"{owner}.{name}, by {_ranks_text(ranks)}" for (owner, name), ranks in writers[:5])
        more = f"; and {len(writers) - 5} more" if len(writers) > 5 else ""
        warnings.warn(
            f"ranks wrote what all {self._ranks} simulated ranks share, and processes do not: {shown}{more}; name the "
            "modules in modules=[...], so that each rank has its own",
            SharedStateWarning,
            stacklevel=4,
        )


def _ranks_text(ranks: set[int]) -> str:
    return f"rank {next(iter(ranks))} only" if len(ranks) == 1 else f"ranks {sorted(ranks)}"


def _name(owner: Any) -> str:
    return owner.__name__ if isinstance(owner, types.ModuleType) else f"{owner.__module__}.{owner.__qualname__}"


def _reached(function: Callable[..., Any], is_own: Callable[[str], bool]) -> Iterator[Any]:
    """Yield the user's modules that a function reaches, and the classes that they define."""
    pending, visited = [*_modules_in(_closure(function))], set()
    while pending:
        name = pending.pop()
        module = sys.modules.get(name)
        if name in visited or module is None or is_own(name) or not _is_users(module):
            continue
        visited.add(name)
        yield module
        values = list(vars(module).values())
        yield from (value for value in values if isinstance(value, type) and value.__module__ == name)
        pending += _modules_in(values)


def _closure(function: Any, depth: int = 3) -> list[Any]:
    """Return a function, and the functions that it is a wrapper of."""
    objects = [function, *(getattr(function, "__defaults__", None) or ())]
    for cell in (getattr(function, "__closure__", None) or ()) if depth else ():
        try:
            objects += _closure(cell.cell_contents, depth - 1)
        except ValueError:  # an empty cell
            continue
    return objects


def _modules_in(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, types.ModuleType):
            yield value.__name__
        elif isinstance(value, types.FunctionType | type):
            yield value.__module__


def _is_users(module: types.ModuleType) -> bool:
    path = getattr(module, "__file__", None)
    return path is not None and not path.startswith(_NOT_OF_A_USER)
