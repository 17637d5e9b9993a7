"""``register``, the decorator that makes a worker's method callable through its group.

It sets one attribute of the function and does not wrap it: called on the worker itself, the method is an ordinary one.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mcontroller.dispatch.modes import Dispatch, DispatchSpec, Execute, RowRule, mode_of_functions
from mcontroller.errors import DispatchError
from mcontroller.partition import Padding

MAGIC_ATTR = "attrs_3141562937"
"""The attribute of a registered function that holds its ``Registration``."""

_RAY_PARAMETER = "_ray_trace_ctx"

Function = TypeVar("Function", bound=Callable[..., Any])
Mode = DispatchSpec | Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class Registration:
    """The arguments of ``register``, checked.

    Attributes:
        dispatch_mode: the mode, also for a dict of functions.
        execute_mode: which ranks run.
        blocking: whether a call waits for its result.
        materialize_futures: whether the method receives a DataProto for a DataProtoFuture.
        rows: how rows are split.
        timeout: seconds after which a call fails with CallTimeout; None uses the group's timeout.
        changes_rows: whether the method may return another number of rows than it got.

    Raises:
        DispatchError: ``execute_mode`` is no member of Execute, or ``timeout`` is not a positive number.
    """

    dispatch_mode: DispatchSpec
    execute_mode: Execute
    blocking: bool = True
    materialize_futures: bool = True
    rows: RowRule = field(default_factory=RowRule)
    timeout: float | None = None
    changes_rows: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.execute_mode, Execute):  # Dispatch.RANK_ZERO would run on all ranks
            raise DispatchError(
                f"execute_mode is {self.execute_mode!r}; expected Execute.ALL or Execute.RANK_ZERO",
                execute_mode=self.execute_mode,
            )
        check_timeout(self.timeout)


def check_timeout(seconds: float | None) -> None:
    """Raise DispatchError unless a deadline is None or a number of seconds above 0."""
    if seconds is not None and not (isinstance(seconds, int | float) and 0 < seconds < math.inf):
        text = f"timeout is {seconds!r}; expected a number of seconds above 0, or None for no deadline"
        raise DispatchError(text, timeout=seconds)


def register(
    dispatch_mode: Mode = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    *,
    padding: Padding | None = None,
    balance: str | None = None,
    group_by: str | None = None,
    within: str | None = None,
    timeout: float | None = None,
    changes_rows: bool = False,
) -> Callable[[Function], Function]:
    """Make a worker's method, sync or async, callable through its group.

    A method that overrides a registered one is registered in the same way, unless it is decorated itself.

    Args:
        dispatch_mode: a member of ``Dispatch``, ``Dispatch.over(...)``, or a dict of two user-defined functions,
            ``dispatch_fn(worker_group, *args, **kwargs) -> (args, kwargs)`` with one list entry per rank, and
            ``collect_fn(worker_group, outputs)``.
        execute_mode: ``Execute.ALL``; or ``Execute.RANK_ZERO``, which sends the arguments as they are to rank 0 alone
            and returns its value.
        blocking: whether a call waits for its result (True) or returns a future at once (False).
        materialize_futures: whether the method receives a DataProto for a DataProtoFuture that the caller passed.
        padding: which rows are added to uneven shards; see ``RowRule``.
        balance: the column whose row sums are balanced over the shards; see ``RowRule``.
        group_by: the column whose equal labels stay in one shard; see ``RowRule``.
        within: the column whose equal labels are balanced by themselves; see ``RowRule``.
        timeout: seconds after which a call fails with CallTimeout; None uses the group's timeout.
        changes_rows: whether the method may return another number of rows than it got, such as n answers to each
            prompt. Otherwise a rank that returns another number is an error, in modes that split rows and concatenate
            results. DataProtos without columns are always allowed, if no rank returns rows.

    Returns:
        A decorator. ``group.method.options(...)`` changes ``padding``, ``balance``, ``group_by``, ``within``,
        ``timeout`` and ``blocking`` for single calls.

    Raises:
        DispatchError: an argument has a wrong type or an unknown value, or what is decorated is not callable (a
            property, for example); raised at the decorator, not by a call.

    Examples:
        >>> class Critic(Worker):
        ...     @register(Dispatch.MEGATRON_COMPUTE_PROTO, padding="zero_loss")
        ...     def compute_values(self, batch: DataProto) -> DataProto: ...
    """
    registration = Registration(
        _as_spec(dispatch_mode),
        execute_mode,
        blocking,
        materialize_futures,
        RowRule(padding, balance, group_by, within),
        timeout,
        changes_rows,
    )

    def decorate(function: Function) -> Function:
        if not callable(function):
            raise DispatchError(
                f"@register decorates functions, not {function!r}: write it below the decorator that returned this"
            )
        setattr(function, MAGIC_ATTR, registration)
        return function

    return decorate


def registration_of(worker_cls: type, method: str) -> Registration | None:
    """Return the registration of a method, or of the method that it overrides; None without one."""
    for base in worker_cls.__mro__:
        defined = vars(base).get(method)
        if isinstance(defined, staticmethod | classmethod) and not hasattr(defined, MAGIC_ATTR):
            defined = defined.__func__  # register is below the decorator
        registration: Registration | None = getattr(defined, MAGIC_ATTR, None)
        if registration is not None:
            return registration
    return None


def written_parameters(signature: inspect.Signature) -> list[inspect.Parameter]:
    """Return the parameters that the user wrote, without the one that ``ray.remote`` adds to methods of a class."""
    return [parameter for parameter in signature.parameters.values() if parameter.name != _RAY_PARAMETER]


def registrations(worker_cls: type) -> dict[str, Registration]:
    """Return the registration of every registered method of a worker class, inherited ones too, by name."""
    return {
        method: registration
        for method in dir(worker_cls)
        if (registration := registration_of(worker_cls, method)) is not None and callable(getattr(worker_cls, method))
    }


def _as_spec(mode: Any) -> DispatchSpec:
    if isinstance(mode, DispatchSpec):
        return mode
    if isinstance(mode, Mapping):
        if set(mode) == {"dispatch_fn", "collect_fn"} and all(map(callable, mode.values())):
            names = ", ".join(getattr(function, "__name__", "a function") for function in mode.values())
            return mode_of_functions(f"functions({names})", **mode)
        raise DispatchError(
            f"dispatch_mode is the dict {dict(mode)}; expected two functions, dispatch_fn and collect_fn",
            dispatch_mode=mode,
        )
    raise DispatchError(
        f"dispatch_mode is {mode!r}; expected a member of Dispatch, Dispatch.over(...) or a dict of functions"
        f"{_mode_hint(mode)}",
        dispatch_mode=mode,
    )


def _mode_hint(mode: Any) -> str:
    if isinstance(mode, str):
        name = mode.removeprefix("Dispatch.")
        close = [name] if name in Dispatch.members else difflib.get_close_matches(name.upper(), Dispatch.members, n=1)
        return f": write Dispatch.{close[0]}, without quotes" if close else f"; modes are {', '.join(Dispatch.members)}"
    return ": write @register() with its parentheses" if callable(mode) else ""
