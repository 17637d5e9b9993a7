"""Configurations that are checked for other machines: this one may lack weights, packages and GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_planning: ContextVar[bool] = ContextVar("planning", default=False)


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """Context manager in which what this machine lacks is no error, because the run starts on others."""
    token = _planning.set(True)
    try:
        yield
    finally:
        _planning.reset(token)


def is_planned() -> bool:
    """Return whether a configuration is checked for other machines."""
    return _planning.get()
