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
import re
import sys
import typing
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from mcontroller.config.imports import import_class
from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Execute
from mcontroller.dispatch.registration import Registration, registrations, written_parameters
from mcontroller.errors import ConfigError
from mcontroller.group import ANSWERED, Future_co, GroupMethod
from mcontroller.transport import Future

P = ParamSpec("P")
R = TypeVar("R")

MEGATRON_GROUP = "mcontroller:MegatronRayWorkerGroup"
PLAIN_GROUP = "mcontroller:RayWorkerGroup"

_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")
"""A name behind that of its module."""
_LITERAL = re.compile(r"'[^']*'")
_TYPE_VARIABLE = re.compile(r"[~+-]\w+")


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
    if ".py:" in arguments.worker:
        text = "expected package.module:Class, by which the module of the group imports it"
        raise ConfigError(f"worker is {arguments.worker!r}; {text}", key="worker", value=arguments.worker)
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
    methods = [
        _method(worker_cls, name, registration)
        for name, registration in registrations(worker_cls).items()
        if not registration.dispatch_mode.in_worker_only and name not in ANSWERED
    ]
    signatures = _LITERAL.sub("", "\n".join(line for method in methods for line in method.splitlines()[1:3]))
    of_worker, of_group = f"{worker_cls.__module__}.{worker_cls.__qualname__}", f"{base.__module__}.{base.__qualname__}"
    return "\n".join(
        [
            f'"""The group of {of_worker}, typed. Written by',
            f'``python -m mcontroller stubs {worker_cls.__module__}:{worker_cls.__qualname__}``; do not edit."""',
            "",
            "from __future__ import annotations",
            "",
            "from typing import TYPE_CHECKING",
            "",
            *(f"import {module}" for module in sorted({base.__module__, worker_cls.__module__})),
            "",
            "if TYPE_CHECKING:",
            *(f"    import {module}" for module in sorted({*map(_module, _DOTTED.findall(signatures))})),
            f"    from {__name__} import group_method",
            "",
            "",
            f"class {worker_cls.__name__}Group({of_group}[{of_worker}]):",
            f'    """A {base.__name__} of {worker_cls.__name__}; type checkers know its methods."""',
            "",
            "    if TYPE_CHECKING:",
            *methods,
            "",
        ]
    )


def _module(name: str) -> str:
    """Return the module of a dotted name: the longest part of it that has been imported."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next(prefix for prefix in prefixes if prefix in sys.modules)


def _text(annotation: Any) -> str:
    """Return an annotation as source, with the whole names of its types; Any for one without a source form."""
    if annotation in (None, type(None)):
        return "None"
    if isinstance(annotation, type) and typing.get_origin(annotation) is None:
        is_builtin = annotation.__module__ == builtins.__name__
        return annotation.__qualname__ if is_builtin else f"{annotation.__module__}.{annotation.__qualname__}"
    text = _TYPE_VARIABLE.sub("typing.Any", repr(annotation).replace("NoneType", "None"))
    return "typing.Any" if isinstance(annotation, str) or "<" in text or "ForwardRef" in text else text


def _method(worker_cls: type, name: str, registration: Registration) -> str:
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
        text = _accepted(_text(Any if unknown else hints.get(parameter.name, Any)), arguments)
        default = inspect.Parameter.empty if parameter.default is inspect.Parameter.empty else ...
        declared.append(parameter.replace(annotation=_Source(text), default=default))
    value = _text(Any if unknown else _awaited(hints.get("return", Any)))
    result, future = _results(value, shown)
    returned = result if registration.blocking else future
    group = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)  # else mypy takes it for a keyword
    signature = str(inspect.Signature([group, *declared])).replace("= Ellipsis", "= ...")
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


def _accepted(text: str, rule: str) -> str:
    return f"collections.abc.Sequence[{text}]" if rule == "entries" else text


def _results(value: str, rule: str) -> tuple[str, str]:
    if rule == "concat":
        return _text(DataProto), _text(DataProto)
    result = f"list[{value}]" if rule == "list" else value
    return result, f"{_text(Future)}[{result}]"


def _awaited(annotation: Any) -> Any:
    return typing.get_args(annotation)[2] if typing.get_origin(annotation) is Coroutine else annotation
