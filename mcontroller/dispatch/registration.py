"""``register``: marks a worker's method as one that a group can call, and says how.

The mark is an attribute of the function, which is otherwise left as it is: called on the worker itself, the method
does what it says, with what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mcontroller.dispatch.modes import Dispatch, DispatchSpec, Execute, ExecuteMode, RowRule, mode_of_functions
from mcontroller.errors import DispatchError
from mcontroller.partition import Padding

__all__ = ["MAGIC_ATTR", "Registration", "register", "registration_of", "registrations"]

MAGIC_ATTR = "attrs_3141562937"
"""The attribute of a registered function that holds its ``Registration``."""

Function = TypeVar("Function", bound=Callable[..., Any])
Mode = DispatchSpec | Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class Registration:
    """What ``register`` was told about a method."""

    dispatch_mode: DispatchSpec
    execute_mode: ExecuteMode
    blocking: bool = True
    materialize_futures: bool = True
    rows: RowRule = field(default_factory=RowRule)
    timeout: float | None = None

    def __post_init__(self) -> None:
        for what, flag in (("blocking", self.blocking), ("materialize_futures", self.materialize_futures)):
            if not isinstance(flag, bool):
                raise DispatchError(f"{what} is {flag!r}; expected True or False", **{what: flag})
        seconds = self.timeout
        if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
            raise DispatchError(f"timeout is {seconds!r}; expected None or more than 0 seconds", timeout=seconds)


def register(
    dispatch_mode: Mode = Dispatch.ALL_TO_ALL,
    execute_mode: ExecuteMode = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    *,
    padding: Padding | None = None,
    balance: str | None = None,
    group_by: str | None = None,
    timeout: float | None = None,
) -> Callable[[Function], Function]:
    """Makes a worker's method, sync or async, callable through its group: a decorator.

    Args:
        dispatch_mode: a row of ``Dispatch``, ``Dispatch.over(...)``, or a dict of a user's own
            ``dispatch_fn(worker_group, *args, **kwargs) -> (args, kwargs)``, one list entry per rank, and
            ``collect_fn(worker_group, outputs)``.
        execute_mode: ``Execute.ALL``, or ``Execute.RANK_ZERO``: as they are to rank 0 alone, and its value back.
        blocking: whether a call waits for its result, or gives a future at once.
        materialize_futures: whether a DataProtoFuture that is passed in is a DataProto by the time the method runs.
        padding, balance, group_by: how rows are split; see ``RowRule``. Per call by ``group.method.options(...)``.
        timeout: seconds after which a call fails with CallTimeout; None leaves it to the group.

    A method that overrides a registered one is registered like it, unless it is decorated itself.
    Raises DispatchError, where it stands, for anything that is not a mode or does not fit.
    """
    registration = Registration(
        _as_spec(dispatch_mode),
        _as_execute_mode(execute_mode),
        blocking,
        materialize_futures,
        RowRule(padding, balance, group_by),
        timeout,
    )

    def mark(function: Function) -> Function:
        if not callable(function):
            raise DispatchError(f"@register marks functions; it was put on {function!r}: put it below any decorator")
        setattr(function, MAGIC_ATTR, registration)
        return function

    return mark


def registration_of(worker_cls: type, method: str) -> Registration | None:
    """How a method is registered: by itself, or by the method that it overrides; None where it is not."""
    for base in worker_cls.__mro__:
        registration = getattr(vars(base).get(method), MAGIC_ATTR, None)
        if registration is not None:
            return registration
    return None


def registrations(worker_cls: type) -> dict[str, Registration]:
    """Every registered method of a worker class, inherited ones too, by name."""
    found = {}
    for method in dir(worker_cls):
        registration = registration_of(worker_cls, method)
        if registration is not None and callable(getattr(worker_cls, method)):
            found[method] = registration
    return found


def _as_spec(mode: Any) -> DispatchSpec:
    if isinstance(mode, DispatchSpec):
        return mode
    if isinstance(mode, Mapping):
        if set(mode) == {"dispatch_fn", "collect_fn"} and all(map(callable, mode.values())):
            names = ", ".join(getattr(function, "__name__", "a function") for function in mode.values())
            return mode_of_functions(f"functions({names})", **mode)
        raise DispatchError(
            f"a mode as a dict has two functions, dispatch_fn and collect_fn; this one has {dict(mode)}",
            dispatch_mode=mode,
        )
    hint = ": write @register() with its parentheses" if callable(mode) else ""
    raise DispatchError(
        f"dispatch_mode is {mode!r}; expected one of Dispatch's modes, Dispatch.over(...) or a dict of functions{hint}",
        dispatch_mode=mode,
    )


def _as_execute_mode(mode: Any) -> ExecuteMode:
    if isinstance(mode, ExecuteMode):
        return mode
    raise DispatchError(
        f"execute_mode is {mode!r}; expected {' or '.join(f'Execute.{m.name}' for m in Execute)}", execute_mode=mode
    )
