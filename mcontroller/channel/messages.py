"""The first frame of calls, answers and queries.

A call and an answer have a fixed head in front of the sender's bytes: one frame instead of two, because CURVE encrypts
each frame by itself. Messages contain pickles, which run code when they are read: only those who have the key of the
group can send them. A message that cannot be read is a `DataError`.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

from typing_extensions import Buffer

from mcontroller.channel.order import Place
from mcontroller.errors import DataError

__all__ = [
    "CallHead",
    "load",
    "pack_answer",
    "pack_call",
    "pack_query",
    "pack_reply",
    "unpack_answer",
    "unpack_call",
    "unpack_query",
    "unpack_reply",
]

_CALL = struct.Struct("<QQ?32sQ")
_ANSWER = struct.Struct("<Q")


CallHead = tuple[int, int, Place | None]
"""The head of a call: its number at its controller, which grows; the number below which all calls of the controller
have been answered, and the answers have arrived; and the call that it follows on this rank, None for the first."""


def pack_call(head: CallHead, body: bytes) -> bytes:
    """Return the first frame of a call."""
    number, settled, after = head
    return _CALL.pack(number, settled, after is not None, *(after or (b"", 0))) + body


def unpack_call(frame: Buffer) -> tuple[CallHead, memoryview]:
    """Return the head of a call, and its body.

    Raises:
        DataError: If the frame is shorter than the head.
    """
    buffer = memoryview(frame)
    try:
        number, settled, follows, caller, after = _CALL.unpack_from(buffer)
    except struct.error:
        raise _too_short("call", len(buffer), _CALL.size) from None
    return (number, settled, (caller, after) if follows else None), buffer[_CALL.size :]


def pack_answer(number: int, body: bytes) -> bytes:
    """Return the first frame of the answer of a call."""
    return _ANSWER.pack(number) + body


def unpack_answer(frame: Buffer) -> tuple[int, memoryview]:
    """Return the number of the call that is answered, and the body of the answer.

    Raises:
        DataError: If the frame is shorter than the head.
    """
    buffer = memoryview(frame)
    try:
        [number] = _ANSWER.unpack_from(buffer)
    except struct.error:
        raise _too_short("answer", len(buffer), _ANSWER.size) from None
    return number, buffer[_ANSWER.size :]


def pack_query(number: int, name: str, arguments: tuple[Any, ...]) -> bytes:
    """Return the message of a query; its number is 0 if no reply is wanted."""
    return pickle.dumps((number, name, arguments))


def unpack_query(message: Any) -> tuple[int, str, tuple[Any, ...]]:
    """Return the number, the name and the arguments of a query.

    Raises:
        DataError: If the message is not a query.
    """
    query = load(message, "query")
    match query:
        case (int(number), str(name), tuple(arguments)):
            return number, name, arguments
    raise DataError(f"a query is {query!r}: expected (number, name, arguments)", query=query)


def pack_reply(number: int, value: Any) -> bytes:
    """Return the first frame of the reply to a query."""
    return pickle.dumps((number, value))


def unpack_reply(frame: Buffer) -> tuple[int, Any]:
    """Return the number of the query, and the value of the reply.

    Raises:
        DataError: If the frame is not a reply.
    """
    reply = load(frame, "reply")
    match reply:
        case (int(number), value):
            return number, value
    raise DataError(f"a reply is {reply!r}: expected (number, value)", reply=reply)


def load(message: Any, kind: str) -> Any:
    """Return the pickled value of a message.

    Args:
        message: Buffer that contains a pickle.
        kind: Kind of the message in the error's text.

    Raises:
        DataError: If it cannot be read.
    """
    try:
        return pickle.loads(message)
    except Exception as error:
        size = memoryview(message).nbytes
        raise DataError(f"a {kind} of {size} bytes cannot be read: {type(error).__name__}: {error}") from error


def _too_short(kind: str, found: int, expected: int) -> DataError:
    return DataError(
        f"the first frame of a message has {found} bytes: the head of a {kind} has {expected}",
        found=found,
        expected=expected,
    )
