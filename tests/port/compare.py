"""Compare the public entries of verl 0.4.1's controller with those of this project: ``python -m tests.port.compare``.

An entry is a public function, a public method or property of a public class, or such a class's ``__init__``. It is
identical if the names, kinds and order of its parameters and their defaults are. It is compatible if this project only
adds optional parameters at the end, or defaults.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import mcontroller
import mcontroller.porting

MODULES = (
    "verl.protocol",
    "verl.single_controller.base.decorator",
    "verl.single_controller.base.worker",
    "verl.single_controller.base.worker_group",
    "verl.single_controller.base.megatron.worker",
    "verl.single_controller.base.megatron.worker_group",
    "verl.single_controller.ray.base",
    "verl.single_controller.ray.megatron",
    "verl.utils.seqlen_balancing",
)
RENAMED = {"MegatronWorkerGroup": "MegatronRayWorkerGroup", "NVMegatronRayWorkerGroup": "MegatronRayWorkerGroup"}

MISSING = object()

Entry = tuple[str, str, str]
"""Name of an entry, what it is here (identical, compatible, differs, missing), and the two signatures."""


def public(module: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__:
            yield name, value


def here(name: str) -> Any:
    """What this project has under a name of verl's; MISSING if it has nothing."""
    renamed = RENAMED.get(name, name)
    if renamed == "MegatronWorker":
        return importlib.import_module("workers").MegatronWorker
    for package in (mcontroller, mcontroller.porting):
        if renamed in package.__all__:
            return getattr(package, renamed)
    return MISSING


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class, those that it inherits from other classes of verl too."""
    for name in dir(cls):
        owner = next((base for base in cls.__mro__ if name in vars(base)), object)
        if owner.__module__.startswith("verl") and (name == "__init__" or not name.startswith("_")):
            yield name, inspect.getattr_static(cls, name)


def member_of(cls: type, name: str) -> Any:
    """The member of a class as it is written; one that its metaclass has, as Dispatch.register, bound to the class."""
    if any(name in vars(base) for base in cls.__mro__):
        return inspect.getattr_static(cls, name)
    return getattr(cls, name, MISSING)


def parameters(value: Any) -> list[inspect.Parameter] | None:
    """The parameters of a function; None for anything else, such as a property."""
    function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    if not callable(function):
        return None
    listed = list(inspect.signature(function).parameters.values())
    return listed[1:] if isinstance(value, classmethod) else listed


def written(value: Any) -> str:
    listed = parameters(value)
    if listed is None:
        return "attribute"
    return "(" + ", ".join(str(each.replace(annotation=each.empty)) for each in listed) + ")"


def state(theirs: Any, ours: Any) -> str:
    expected, found = parameters(theirs), parameters(ours)
    if expected is None or found is None:
        return "identical" if (expected is None) == (found is None) else "differs"
    pairs = [(each.name, each.kind, default_of(each)) for each in expected]
    mine = [(each.name, each.kind, default_of(each)) for each in found]
    if pairs == mine:
        return "identical"
    added = found[len(pairs) :]
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    optional = all(each.default is not each.empty or each.kind in variable for each in added)
    same = mine[: len(pairs)] == pairs or [name for name, *_ in mine[: len(pairs)]] == [name for name, *_ in pairs]
    both = zip(expected, found, strict=False)
    defaults = all(each.default is each.empty or default_of(each) == default_of(other) for each, other in both)
    return "compatible" if same and optional and defaults else "differs"


def default_of(parameter: inspect.Parameter) -> Any:
    """The default; a member of an enum, or a mode, by its name."""
    return getattr(parameter.default, "name", parameter.default)


def compare() -> list[Entry]:
    found: dict[str, Entry] = {}
    for module in map(importlib.import_module, MODULES):
        for name, theirs in public(module):
            ours = here(name)
            if not isinstance(theirs, type):
                if callable(theirs):
                    found[name] = _entry(name, theirs, ours)
                continue
            for member, value in members(theirs):
                mine = MISSING if ours is MISSING else member_of(ours, member)
                found[f"{name}.{member}"] = _entry(f"{name}.{member}", value, mine)
    return list(found.values())


def _entry(name: str, theirs: Any, ours: Any) -> Entry:
    if ours is MISSING:
        return name, "missing", f"{written(theirs)} there"
    return name, state(theirs, ours), f"{written(theirs)} there, {written(ours)} here"


def main() -> None:
    entries = compare()
    counts = Counter(kind for _, kind, _ in entries)
    for name, kind, text in sorted(entries, key=lambda entry: (entry[1], entry[0])):
        if kind != "identical":
            sys.stdout.write(f"{kind:10}  {name}: {text}\n")
    sys.stdout.write(summary(counts) + "\n")


def summary(counts: Counter[str]) -> str:
    kinds = ("identical", "compatible", "differs", "missing")
    return f"{sum(counts.values())} entries: " + ", ".join(f"{counts[kind]} {kind}" for kind in kinds)


if __name__ == "__main__":
    main()
