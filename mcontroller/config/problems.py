"""Several errors of one configuration, reported together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mcontroller.errors import ConfigError, MControllerError

__all__ = ["Problems"]

T = TypeVar("T")


class Problems:
    """Errors that are collected and then raised together.

    Attributes:
        errors: the errors so far.
    """

    def __init__(self) -> None:
        self.errors: list[MControllerError] = []

    def attempt(self, action: Callable[[], T]) -> T | None:
        """Return the result of ``action``; None if it raises an error of this project, which is collected."""
        try:
            return action()
        except MControllerError as error:
            self.errors.append(error)
            return None

    def raise_any(self) -> None:
        """Raise the error if there is one; if there are several, one ConfigError with a line for each.

        Raises:
            ConfigError: there are several errors, which are its field ``errors``; or the one is a ConfigError.
        """
        by_line = {f"{type(error).__name__}: {error}": error for error in reversed(self.errors)}  # each text once
        lines, errors = list(by_line)[::-1], list(by_line.values())[::-1]
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise ConfigError(
                "\n  ".join([f"the configuration has {len(lines)} errors:", *lines]),
                key=getattr(errors[0], "key", ""),
                value=None,
                errors=errors,
            )
