"""Private copies: what crosses from the caller to a rank, or back, in one process as it would between processes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from mcontroller.transport import Arguments, Deferred

_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes)


def private_copy(value: Any) -> Any:
    """A copy that shares no memory with ``value``; a tensor that is a view is copied alone, without its storage.

    Deferred values stay as they are: they are resolved to private copies. Raises what ``copy.deepcopy`` raises for
    objects that cannot be copied, which could not be sent to another process either.
    """
    if isinstance(value, (*_IMMUTABLE, Deferred)):
        return value
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
    """The arguments of one rank, as its own."""
    return Arguments(private_copy(tuple(arguments.args)), private_copy(dict(arguments.kwargs)))
