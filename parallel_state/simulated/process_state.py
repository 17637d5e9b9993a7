"""Everything that a process has to itself, as the parts that are swapped when another simulated rank goes on."""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import random
import sys
import threading
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from parallel_state.patches.import_hook import ImportHook
from parallel_state.rank_state import Attributes, RankState, StatePart, StateValue, distributed_parts
from parallel_state.requirements import has_megatron
from parallel_state.simulated.own_modules import OwnModules

# Containers and objects that are changed in place, so that no function rebinds the name.
_CHANGED_IN_PLACE = {
    "megatron.core.tensor_parallel.random": ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED"),
    "megatron.core.transformer.moe.moe_utils": ("_MOE_LAYER_WISE_LOGGING_TRACKER",),
}
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_STORE_ATTR = dis.opmap["STORE_ATTR"]
_MODULES = ("megatron", "workers", "mcontroller.transport")  # the last has the event loop of async methods
_BELOW_MODULES = tuple(f"{package}." for package in _MODULES)


class ProcessState:
    """The parts of a process's state, and new ranks' sets of them.

    Args:
        functions: object -> names of the attributes that each rank replaces, such as functions of torch.
        own_modules: the packages that each rank imports for itself.
    """

    def __init__(self, functions: Mapping[Any, tuple[str, ...]], own_modules: OwnModules) -> None:
        self._own_modules = own_modules
        self._known: set[str] = set()
        self._environment = StateValue(lambda: dict(_variables()), _set_variables)
        self._replaced = {id(owner): Attributes(owner, names, _same) for owner, names in functions.items()}
        self.parts: list[StatePart] = [
            *distributed_parts(),
            *self._replaced.values(),
            self._environment,
            Attributes(sys, ("excepthook",), _same),
            StateValue(random.getstate, random.setstate),
            StateValue(np.random.get_state, np.random.set_state),
            StateValue(torch.get_rng_state, torch.set_rng_state),
            StateValue(torch.get_default_dtype, torch.set_default_dtype),
            StateValue(os.getcwd, _change_directory),
            own_modules,
        ]
        if has_megatron():
            self._add_megatron()
        self._count = 0
        self.add_imported()

    def _add_megatron(self) -> None:
        """Import Megatron now, so that no rank has its own first values of it, and add the state of a layout."""
        from parallel_state import megatron

        self.parts += [
            *megatron.layout_parts()[:-1],  # the device's generator is the CPU's
            Attributes(megatron, ("context_switch",), lambda _: megatron.new_context_switch()),
        ]

    def new_rank(self, variables: Mapping[str, str], replacements: Mapping[Any, Mapping[str, Any]]) -> RankState:
        """Return the state of a new rank.

        Args:
            variables: environment variables in addition to those of this process.
            replacements: object -> name -> value of the attributes that were named to ``ProcessState``.
        """
        state = RankState(self.parts)
        state.values[self.parts.index(self._environment)].update(
            {os.fsencode(name): os.fsencode(value) for name, value in variables.items()}
        )
        for owner, values in replacements.items():
            state.values[self.parts.index(self._replaced[id(owner)])].update(values)
        return state

    def add_imported(self) -> None:
        """Add the globals of modules that were imported since the last call; ranks start with their values now."""
        if len(sys.modules) == self._count:
            return
        self._count = len(sys.modules)
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType) and self._is_swapped(module.__name__):
                self._add(module)

    @contextlib.contextmanager
    def watched_imports(self) -> Iterator[None]:
        """Return a context manager in which a module is added at the end of its import, with its first values."""
        hooks = [ImportHook(self._is_swapped, self._add), self._own_modules.hook()]
        sys.meta_path[:0] = hooks
        try:
            yield
        finally:
            for hook in hooks:
                sys.meta_path.remove(hook)

    def _is_swapped(self, name: str) -> bool:
        inside = name in _MODULES or name.startswith(_BELOW_MODULES)
        return inside and not self._own_modules.has(name)

    def _add(self, module: ModuleType) -> None:
        if module.__name__ in self._known:
            return
        self._known.add(module.__name__)
        named = {name for part in self.parts if isinstance(part, Attributes) and part.owner is module
                 for name in part.names}  # fmt: skip
        names = [name for name in _rebound(module) if name not in named]
        if names:
            self.parts.append(Attributes(module, names, _own))
        self.parts += [
            Attributes(owner, changed, _own) for owner in _classes(module) if (changed := _changed_by_methods(owner))
        ]


def _variables() -> dict[bytes, bytes]:
    variables: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
    return variables


def _set_variables(value: dict[bytes, bytes]) -> None:
    """Set and delete environment variables until they are ``value``."""
    now = _variables()
    if now == value:
        return
    for name in [name for name in now if name not in value]:
        del os.environb[name]
    for name, member in value.items():
        if now.get(name) != member:
            os.environb[name] = member


def _change_directory(directory: str) -> None:
    if os.getcwd() != directory:
        os.chdir(directory)


def _same(value: Any) -> Any:
    return value


def _own(value: Any) -> Any:
    """Return a new rank's value of a global: containers and locks are its own."""
    if type(value) in (dict, list, set):
        return value.copy()
    return type(value)() if isinstance(value, type(threading.RLock())) else value


@functools.cache
def _rebound(module: ModuleType) -> list[str]:
    """Return the names that functions of a module rebind with ``global``, and those that are changed in place."""
    names = set(_CHANGED_IN_PLACE.get(module.__name__, ()))
    for code in {code for function in _functions(module) for code in _codes(function.__code__)}:
        if _STORE_GLOBAL not in code.co_code[::2]:  # decoding all instructions takes a second
            continue
        names.update(
            instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == "STORE_GLOBAL"
        )
    return sorted(name for name in names if name in vars(module))


def _changed_by_methods(owner: type) -> list[str]:
    """Return the attributes of a class that its class and static methods set, and the containers that they name."""
    methods = [method for method in vars(owner).values() if isinstance(method, classmethod | staticmethod)]
    functions = [function for function in map(_plain, methods) if isinstance(function, FunctionType)]
    return sorted(
        {
            name
            for function in functions
            for name in vars(owner).keys() & function.__code__.co_names
            if not name.startswith("__")
            and (type(vars(owner)[name]) in (dict, list, set) or name in _set_by(function.__code__))
        }
    )


@functools.cache  # every simulation asks for the same functions of Megatron
def _set_by(code: CodeType) -> set[str]:
    """Return the names of the attributes that a function sets."""
    return {instruction.argval for instruction in dis.get_instructions(code) if instruction.opcode == _STORE_ATTR}


def _classes(module: ModuleType) -> list[type]:
    """Return the classes that a module defines."""
    values = vars(module).values()
    return [value for value in values if isinstance(value, type) and value.__module__ == module.__name__]


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    for owner in (module, *_classes(module)):
        for value in list(vars(owner).values()):
            plain = _plain(value)
            if isinstance(plain, FunctionType) and plain.__module__ == module.__name__:
                yield plain


def _plain(function: Any) -> Any:
    """Return what a method, or what a decorator returned, calls."""
    function = getattr(function, "__func__", function)
    return getattr(function, "__wrapped__", function)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
