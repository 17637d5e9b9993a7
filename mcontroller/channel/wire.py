"""The wire of the channel: messages of calls, answers and queries, and the frames and sockets that carry them.

A call and an answer are a header and a value: the first frame has both, one after the other, because CURVE encrypts
each frame by itself; the other frames are the buffers of the value. The header of a call is a pickle, the header of an
answer is a number and a byte. Messages contain pickles, which run code when they are read: only those who have proven
that they may send them are read. A message that cannot be read is a `DataError`.
"""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Sequence
from struct import Struct
from typing import Any, NamedTuple

import zmq
from typing_extensions import Buffer

from mcontroller.errors import DataError, GroupError

SILENT_SECONDS = 30
"""Time after which a connection to a node that vanished without closing it is lost."""

Place = tuple[bytes, int]
"""The call after which another runs on a rank: its controller, and its number there."""

_SIZE_BYTES = 4
_ANSWER = Struct("<qB")
_INLINE, _STORED, _FAILED = range(3)

_SNDMORE, _RCVMORE = int(zmq.SNDMORE), int(zmq.RCVMORE)
"""Plain integers: pyzmq's enumerations cost time at each use."""

get_option: Any = zmq.backend.Socket.get
"""``zmq.Socket.get`` without the enumeration that it makes of the value."""

_send: Any = zmq.backend.Socket.send
"""``zmq.Socket.send`` without the options of draft sockets: socket, frame, flags, and whether to copy."""


class CallHeader(NamedTuple):
    """The header of a call to a rank.

    Attributes:
        number: number of the call at its controller, which grows.
        settled: all calls of the controller below this number have been answered, and the answers have arrived.
        after: the call that it follows on this rank; None for the first.
        role: the role whose worker runs the method; None for a method of the process itself.
        method: name of the method.
        returning: the ranks, of those with these arguments, whose values are sent back.
        keep: whether the value stays in the process until it is asked for.
    """

    number: int
    settled: int
    after: Place | None
    role: str | None
    method: str
    returning: Sequence[int] = ()
    keep: bool = False


_CALL_TYPES = (int, int, tuple | None, str | None, str, list | tuple, bool)


def pack_call(header: CallHeader, data: bytes) -> bytes:
    """Return the first frame of a call; ``data`` is the pickle of the arguments."""
    packed = pickle.dumps(tuple(header))
    return b"".join([len(packed).to_bytes(_SIZE_BYTES, "little"), packed, data])


def unpack_call(frame: Buffer) -> tuple[CallHeader, memoryview]:
    """Return the header of a call, and the pickle of its arguments.

    Raises:
        DataError: if the frame is not of a call.
    """
    buffer = memoryview(frame)
    end = _SIZE_BYTES + int.from_bytes(buffer[:_SIZE_BYTES], "little")
    if not _SIZE_BYTES < end <= len(buffer):
        raise _too_short(buffer, "call", end)
    header = _load(buffer[_SIZE_BYTES:end], "call")
    if isinstance(header, tuple) and len(header) == len(_CALL_TYPES) and all(map(isinstance, header, _CALL_TYPES)):
        call = CallHeader(*header)
        if call.after is None or tuple(map(type, call.after)) == (bytes, int):
            return call, buffer[end:]
    expected = "(number, settled, after, role, method, ranks, keep)"
    raise DataError(f"the header of a call is {header!r}: expected {expected}", header=header)


def pack_answer(number: int, error: GroupError | None, stored: bool, data: bytes) -> bytes:
    """Return the first frame of the answer of a rank.

    Args:
        number: number of the call.
        error: why the rank failed; None if it did not.
        stored: whether the value is in the object store.
        data: the pickle of the value, or of its reference.
    """
    if error is not None:
        return _ANSWER.pack(number, _FAILED) + pickle.dumps(error)
    return _ANSWER.pack(number, _STORED if stored else _INLINE) + data


def unpack_answer(frame: Buffer) -> tuple[int, GroupError | None, bool, memoryview]:
    """Return what ``pack_answer`` was called with.

    Raises:
        DataError: if the frame is not of an answer.
    """
    buffer = memoryview(frame)
    if len(buffer) < _ANSWER.size:
        raise _too_short(buffer, "answer", _ANSWER.size)
    number, kind = _ANSWER.unpack_from(buffer)
    data = buffer[_ANSWER.size :]
    if kind in (_INLINE, _STORED):
        return number, None, kind == _STORED, data
    error = _load(data, "answer") if kind == _FAILED else None
    if not isinstance(error, GroupError):
        text = (
            f"an answer of kind {kind} has {error!r}: expected kinds {_INLINE}, {_STORED}, or {_FAILED} with an error"
        )
        raise DataError(text, kind=kind)
    return number, error, False, data


def _too_short(buffer: memoryview, kind: str, end: int) -> DataError:
    text = f"the first frame of a message has {len(buffer)} bytes: the header of a {kind} ends at byte {end}"
    return DataError(text, actual=len(buffer), expected=end)


def pack_query(number: int, name: str, arguments: tuple[Any, ...]) -> bytes:
    """Return the message of a query; its number is 0 if no reply is wanted."""
    return pickle.dumps((number, name, arguments))


def unpack_query(message: Any) -> tuple[int, str, tuple[Any, ...]]:
    """Return the number, the name and the arguments of a query.

    Raises:
        DataError: if the message is not a query.
    """
    query = _load(message, "query")
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
        DataError: if the frame is not a reply.
    """
    reply = _load(frame, "reply")
    match reply:
        case (int(number), value):
            return number, value
    raise DataError(f"a reply is {reply!r}: expected (number, value)", reply=reply)


def _load(message: Any, kind: str) -> Any:
    """Return the pickled value of a message.

    Args:
        message: buffer that contains a pickle.
        kind: kind of the message in the error's text.

    Raises:
        DataError: if it cannot be read.
    """
    try:
        return pickle.loads(message)
    except Exception as error:
        size = memoryview(message).nbytes
        raise DataError(f"a {kind} of {size} bytes cannot be read: {type(error).__name__}: {error}") from error


# ---- frames and sockets ---------------------------------------------------------------------------------------------


def send_frames(socket: zmq.Socket[Any], frames: Sequence[Any]) -> None:
    """Send a message. Only small frames are copied, because bytes never change."""
    for frame in frames[:-1]:
        _send(socket, frame, _SNDMORE, False)
    _send(socket, frames[-1], 0, False)


def receive_frames(socket: zmq.Socket[Any]) -> list[Buffer]:
    """Return the frames of a message, in separate memory; the first, which is small, as bytes."""
    frames: list[Buffer] = [socket.recv()]
    while get_option(socket, _RCVMORE):
        frames.append(socket.recv(copy=False).buffer)
    return frames


def configure(socket: zmq.Socket[Any]) -> zmq.Socket[Any]:
    """Set what both sides of the channel have in common: no limit of queued messages, and what notices a lost node.

    The kernel probes connections, also to a frozen process. ZeroMQ's own heartbeats search all timers of a process
    for each reply: with 16,384 connections they took half of its thread's time.
    """
    socket.sndhwm = socket.rcvhwm = socket.linger = 0
    socket.tcp_keepalive, socket.tcp_keepalive_cnt = 1, 2
    socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = SILENT_SECONDS // 3
    socket.tcp_maxrt = SILENT_SECONDS * 1000  # for messages that were sent and not acknowledged
    return socket


def monitor(socket: zmq.Socket[Any], events: int) -> zmq.Socket[Any]:
    """Return a socket to read the events of another.

    Its queue has no limit: ZeroMQ's thread, which serves all connections, would wait for a reader of a full one.
    """
    url = f"inproc://events-{uuid.uuid4().hex}"
    socket.monitor(url, events)
    reader: zmq.Socket[Any] = socket.context.socket(zmq.PAIR)
    reader.rcvhwm = reader.linger = 0
    reader.connect(url)
    return reader
