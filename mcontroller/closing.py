"""End several things, all of them even if one fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mcontroller.errors import ShutdownError

__all__ = ["close_all"]


def close_all(what: str, closings: Iterable[tuple[str, Callable[[], object]]]) -> None:
    """Call every function, and raise the errors of all of them together.

    Args:
        what: what is ended, for the message.
        closings: the name of each part, and the function that ends it.

    Raises:
        ShutdownError: several functions raised. The error of only one is raised as it is.
    """
    errors: dict[str, Exception] = {}
    for name, close in closings:
        try:
            close()
        except Exception as error:
            errors[name] = error
    if len(errors) == 1:
        raise next(iter(errors.values()))
    if errors:
        lines = (f"{name}: {type(error).__name__}: {error}" for name, error in errors.items())
        text = f"{len(errors)} parts of {what} could not be ended as they should; all others have ended:\n"
        raise ShutdownError(text + "\n".join(lines), errors=errors) from next(iter(errors.values()))
