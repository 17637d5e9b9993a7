"""The wire of the channel: messages of calls and answers, and the frames and sockets that carry them.

A call and an answer are a header and a value: the first frame has both, one after the other, because CURVE encrypts
each frame by itself; the other frames are the buffers of the value. The header of a call is a pickle, the header of an
answer is a number and a byte. Messages contain pickles, which run code when they are read: only those of a peer
that has proven that it may send them are read.
"""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Sequence
from struct import Struct
from typing import Any, NamedTuple

import zmq
from typing_extensions import Buffer

from mcontroller.errors import GroupError

SILENT_SECONDS = 30
"""Time after which a connection to a node that vanished without closing it is lost."""

Place = tuple[bytes, int]
"""The call after which another runs on a rank: its controller, and its number there."""

_SIZE_BYTES = 4
_ANSWER = Struct("<qB")
_INLINE, _STORED, _FAILED = range(3)

SMALL_BYTES = 1 << 16
"""Smaller frames are copied, which costs less than sharing them with ZeroMQ's thread."""

_SNDMORE = int(zmq.SNDMORE)
"""A plain integer: pyzmq's enumerations cost time at each use."""

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


def pack_call(header: CallHeader, data: bytes) -> bytes:
    """Return the first frame of a call; ``data`` is the pickle of the arguments."""
    packed = pickle.dumps(tuple(header))
    return b"".join([len(packed).to_bytes(_SIZE_BYTES, "little"), packed, data])


def unpack_call(frame: Buffer) -> tuple[CallHeader, memoryview]:
    """Return the header of a call, and the pickle of its arguments."""
    buffer = memoryview(frame)
    end = _SIZE_BYTES + int.from_bytes(buffer[:_SIZE_BYTES], "little")
    return CallHeader(*pickle.loads(buffer[_SIZE_BYTES:end])), buffer[end:]


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
    """Return what ``pack_answer`` was called with."""
    buffer = memoryview(frame)
    number, kind = _ANSWER.unpack_from(buffer)
    data = buffer[_ANSWER.size :]
    error = pickle.loads(data) if kind == _FAILED else None
    return number, error, kind == _STORED, data


# ---- frames and sockets ---------------------------------------------------------------------------------------------


def send_frames(socket: zmq.Socket[Any], frames: Sequence[bytes]) -> None:
    """Send a message. Only small frames are copied, because bytes never change."""
    for frame in frames[:-1]:
        _send(socket, frame, _SNDMORE, len(frame) < SMALL_BYTES)
    _send(socket, frames[-1], 0, len(frames[-1]) < SMALL_BYTES)


def receive_frames(socket: zmq.Socket[Any]) -> list[Buffer]:
    """Return the frames of a message, each in memory of its own, which the reader may write into."""
    frames: list[Buffer] = []
    while True:
        frame = socket.recv(copy=False)
        frames.append(frame.buffer)
        if not frame.more:  # costs less than the option RCVMORE
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
