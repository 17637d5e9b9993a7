"""The bodies of calls and answers between a controller and its worker processes."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from mcontroller.channel.messages import load
from mcontroller.errors import DataError, GroupError
from mcontroller.ray.values.wire import encode

__all__ = ["CallHeader", "read_answer", "read_call", "write_answer", "write_call"]

Content = tuple[Any, ...]
"""A value as plain values for a message's pickle: the content of an ``Encoded``."""


CallHeader = tuple[str | None, str, Sequence[int], bool]
"""The header of a call to the ranks that get the same arguments; it is sent in front of the arguments.

The role whose worker runs the method, None for a method of the process itself; the name of the method; the ranks, of
those with these arguments, whose values are sent back; whether the value stays in the process until it is
asked for."""


def write_call(header: CallHeader, arguments: Content) -> bytes:
    """Return the body of a call."""
    return pickle.dumps((header, arguments))


def read_call(body: Any) -> tuple[CallHeader, Content]:
    """Return the header of a call, and the content of its arguments.

    Raises:
        DataError: If the body of the message is not that of a call.
    """
    call = load(body, "call")
    match call:
        case (str() | None as role, str(method), list() | tuple() as returning, bool(keep)), (int(), *_) as arguments:
            return (role, method, returning, keep), arguments
    raise DataError(f"a call is {call!r}: expected ((role, method, ranks, keep), arguments)", call=call)


def write_answer(error: GroupError | None, value: Content) -> bytes:
    """Return the body of the answer of a rank."""
    if error is None and value == _NOTHING:
        return _DONE
    return pickle.dumps((error, value))


def read_answer(body: Any) -> tuple[GroupError | None, Content]:
    """Return the error of a rank, if it has failed, and the content of its value.

    Raises:
        DataError: If the body of the message is not that of an answer.
    """
    if body == _DONE:  # costs a fifth of reading it, and most answers are this one
        return None, _NOTHING
    answer = load(body, "answer")
    match answer:
        case (GroupError() | None as error, (int(), *_) as value):
            return error, value
    raise DataError(f"an answer is {answer!r}: expected (error, value)", answer=answer)


_NOTHING = encode(None, 0).content
_DONE = pickle.dumps((None, _NOTHING))
