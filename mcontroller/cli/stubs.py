"""Write a typed group class for a worker class, for editors and type checkers: mypy, pyright, Pylance, PyCharm.

``python -m mcontroller stubs package.module:CriticWorker -o critic_group.py`` writes ``class CriticWorkerGroup``, which
declares every registered method of ``CriticWorker`` with the parameters and the result that a call through a group has.
Use it in place of the group class::

    critic = CriticWorkerGroup(pool, RayClassWithInitArgs(CriticWorker, config))

Write it again when the worker's methods change.
"""

from __future__ import annotations

import argparse
import builtins
import inspect
import sys
import types
import typing
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from mcontroller.config.imports import import_class
from mcontroller.dispatch.modes import Execute
from mcontroller.dispatch.registration import Registration, registrations, written_parameters
from mcontroller.group import ANSWERED, Future_co, GroupMethod

P = ParamSpec("P")
R = TypeVar("R")

MEGATRON_GROUP = "mcontroller:MegatronRayWorkerGroup"
PLAIN_GROUP = "mcontroller:RayWorkerGroup"


def group_method(
    future: type[Future_co],
) -> Callable[[Callable[Concatenate[Any, P], R]], GroupMethod[P, R, Future_co]]:
    """Declare a method of a typed group; ``future`` is the type that its calls return with ``blocking=False``.

    Generated classes use it under ``if TYPE_CHECKING:``. It has no use at run time.
    """
    raise NotImplementedError("group_method is for type checkers: use it under `if TYPE_CHECKING:`")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m mcontroller stubs``."""
    parser.add_argument("worker", help="the worker class, as package.module:Class")
    parser.add_argument("-o", "--output", type=Path, help="the file to write; the standard output by default")
    parser.add_argument("--group", help="the group class to extend, as package.module:Class")


def run(arguments: argparse.Namespace) -> int:
    """Run ``python -m mcontroller stubs``; return the exit status.

    Raises:
        ConfigError: the worker or the group is not an importable class.
    """
    text = typed_group(import_class(arguments.worker, "worker"), arguments.group)
    if arguments.output is None:
        sys.stdout.write(text)
    else:
        arguments.output.write_text(text)
    return 0


def typed_group(worker_cls: type, group: str | None = None) -> str:
    """Return the source of a module with a typed group class for ``worker_cls``.

    Args:
        worker_cls: a worker class that can be imported from its module.
        group: the group class to extend, as ``package.module:Class``; by default MegatronRayWorkerGroup for Megatron
            workers and RayWorkerGroup for others.

    Raises:
        ConfigError: the group is not an importable class.
    """
    default = MEGATRON_GROUP if hasattr(worker_cls, "get_megatron_rank_info") else PLAIN_GROUP
    base = import_class(group or default, "group")
    names = _Names(base, worker_cls)
    head = f"class {worker_cls.__name__}Group({names.of(base)}[{names.of(worker_cls)}]):"
    methods = [
        _method(worker_cls, name, registration, names)
        for name, registration in registrations(worker_cls).items()
        if not registration.dispatch_mode.in_worker_only and name not in ANSWERED
    ]
    checked = names.checked_imports()
    return "\n".join(
        [
            f'"""The group of {worker_cls.__module__}.{worker_cls.__qualname__}, typed. Written by',
            f'``python -m mcontroller stubs {worker_cls.__module__}:{worker_cls.__qualname__}``; do not edit."""',
            "",
            "from __future__ import annotations",
            "",
            "from typing import TYPE_CHECKING",
            "",
            f"from {base.__module__} import {base.__qualname__}",
            f"from {worker_cls.__module__} import {worker_cls.__qualname__}",
            "",
            "if TYPE_CHECKING:",
            *(f"    {line}" for line in checked),
            "",
            "",
            head,
            f'    """A {base.__name__} of {worker_cls.__name__}; type checkers know its methods."""',
            "",
            "    if TYPE_CHECKING:",
            *methods,
            "",
        ]
    )


class _Names:
    """The names that generated code uses, and the modules that they are imported from."""

    def __init__(self, *imported: type) -> None:
        self._imported = {(cls.__module__, cls.__qualname__) for cls in imported}
        self._imports: dict[str, set[str]] = {}
        self.add("mcontroller.cli.stubs", "group_method")

    def add(self, module: str, name: str) -> str:
        if (module, name) not in self._imported:
            self._imports.setdefault(module, set()).add(name)
        return name

    def checked_imports(self) -> list[str]:
        return [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(self._imports.items())]

    def of(self, cls: type) -> str:
        if cls.__module__ == builtins.__name__:
            return cls.__qualname__
        self.add(cls.__module__, cls.__qualname__.partition(".")[0])
        return cls.__qualname__

    def text(self, annotation: Any) -> str:
        """Return an annotation as source; Any for an annotation without a source form."""
        if annotation is inspect.Parameter.empty or annotation is Any or isinstance(annotation, str | TypeVar):
            return self.add("typing", "Any")
        if annotation is None or annotation is type(None):
            return "None"
        if annotation is Ellipsis:
            return "..."
        if isinstance(annotation, list):
            return f"[{', '.join(map(self.text, annotation))}]"
        origin, args = typing.get_origin(annotation), typing.get_args(annotation)
        if origin in (typing.Union, types.UnionType):
            return " | ".join(dict.fromkeys(map(self.text, args)))
        if origin is typing.Literal:
            return f"{self.add('typing', 'Literal')}[{', '.join(map(repr, args))}]"
        if origin is typing.Annotated:
            return self.text(args[0])
        if isinstance(origin, type):
            return f"{self.of(origin)}[{', '.join(map(self.text, args))}]"
        return self.of(annotation) if isinstance(annotation, type) else self.add("typing", "Any")


def _method(worker_cls: type, name: str, registration: Registration, names: _Names) -> str:
    static = inspect.getattr_static(worker_cls, name)
    function = inspect.unwrap(getattr(worker_cls, name))
    hints = _hints(function)
    spec, zero = registration.dispatch_mode, registration.execute_mode is Execute.RANK_ZERO
    unknown = spec.functions is not None and not zero  # user-defined functions have parameters and results of any type
    arguments, shown = ("whole", "value") if zero or unknown else (spec.arguments, spec.result)
    parameters = written_parameters(inspect.signature(function))
    if not isinstance(static, staticmethod | classmethod):
        parameters = parameters[1:]
    declared = []
    for parameter in parameters:
        text = _accepted(names.text(Any if unknown else hints.get(parameter.name, Any)), arguments, names)
        default = inspect.Parameter.empty if parameter.default is inspect.Parameter.empty else ...
        declared.append(parameter.replace(annotation=_Source(text), default=default))
    value = names.text(Any if unknown else _awaited(hints.get("return", Any)))
    result, future = _results(value, shown, names)
    returned = result if registration.blocking else future
    positional_only = any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in declared)
    kind = inspect.Parameter.POSITIONAL_ONLY if positional_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = str(inspect.Signature([inspect.Parameter("self", kind), *declared])).replace("= Ellipsis", "= ...")
    summary = (inspect.getdoc(function) or "").partition("\n")[0]
    text = f"{summary} Defined as {function.__module__}.{function.__qualname__}.".lstrip()
    return "\n".join(
        [
            "",
            f"        @group_method({future})",
            f"        def {name}{signature} -> {returned}:",
            f"            {text!r}" if '"' in text or "\\" in text else f'            """{text}"""',
        ]
    )


class _Source(str):
    """Source text that ``inspect`` writes as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the resolved annotations; {} if one of them uses a name that is imported only for type checkers."""
    try:
        return typing.get_type_hints(function)
    except NameError:
        return {}


def _accepted(text: str, rule: str, names: _Names) -> str:
    return f"{names.add('collections.abc', 'Sequence')}[{text}]" if rule == "entries" else text


def _results(value: str, rule: str, names: _Names) -> tuple[str, str]:
    if rule == "concat":
        batch = names.add("mcontroller.data.batch", "DataProto")
        return batch, batch
    result = f"list[{value}]" if rule == "list" else value
    return result, f"{names.add('mcontroller.transport', 'Future')}[{result}]"


def _awaited(annotation: Any) -> Any:
    return typing.get_args(annotation)[2] if typing.get_origin(annotation) is Coroutine else annotation
