"""Unknown keyword arguments of public functions, reported as errors of this project."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from parallel_state.errors import MControllerError

F = TypeVar("F", bound=Callable[..., Any])


def known_keywords(error: type[MControllerError]) -> Callable[[F], F]:
    """Decorate a function, or a class, so that an unknown keyword argument is an error with the name that is close.

    Args:
        error: the type; its fields are ``argument``, the unknown name, and ``arguments``, the known ones.
    """

    def decorate(function: F) -> F:
        if isinstance(function, type):
            setattr(function, "__init__", decorate(vars(function)["__init__"]))  # noqa: B010  # mypy rejects the assignment
            return function
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            unknown = next((name for name in kwargs if name not in known), None)
            if unknown is None:
                return function(*args, **kwargs)
            close = difflib.get_close_matches(unknown, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"its arguments are {', '.join(known)}"
            called = function.__qualname__.removesuffix(".__init__")
            raise error(f"{called} has no argument {unknown!r}; {hint}", argument=unknown, arguments=known)

        return checked  # type: ignore[return-value]

    return decorate
