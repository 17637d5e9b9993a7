"""Private copies of values that go from the caller to a rank or back, as if they were separate processes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from mcontroller.transport import Arguments, Deferred

_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes)


def private_copy(value: Any) -> Any:
    """Return a copy that shares no memory with ``value``; of a view, only the visible part of its storage is copied.

    A Deferred copies only the values that it has itself, because its handles resolve to private copies. Objects that
    cannot be copied raise what ``copy.deepcopy`` raises; they could not be sent to another process either.
    """
    if isinstance(value, _IMMUTABLE):
        return value
    if isinstance(value, Deferred):
        return value.private(private_copy)
    if type(value) is torch.Tensor and not value.is_nested:
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.copy()
    if type(value) is dict:
        return {key: private_copy(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(private_copy, value))
    return copy.deepcopy(value)


def private_arguments(arguments: Arguments) -> Arguments:
    """Return a private copy of the arguments for one rank."""
    return Arguments(private_copy(tuple(arguments.args)), private_copy(dict(arguments.kwargs)))
