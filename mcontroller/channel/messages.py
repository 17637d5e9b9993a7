"""The first frame of calls and of answers: a fixed head in front of the sender's bytes.

One frame instead of two, because CURVE encrypts each frame by itself.
"""

from __future__ import annotations

import struct

import zmq

from mcontroller.channel.order import Place

__all__ = ["CallHead", "pack_answer", "pack_call", "unpack_answer", "unpack_call"]

_CALL = struct.Struct("<QQ?32sQ")
_ANSWER = struct.Struct("<Q")


CallHead = tuple[int, int, Place | None]
"""The head of a call: its number at its controller, which grows; the number below which all calls of the controller
have been answered, and the answers have arrived; and the call that it follows on this rank, None for the first."""


def pack_call(head: CallHead, body: bytes) -> bytes:
    """Return the first frame of a call."""
    number, settled, after = head
    return _CALL.pack(number, settled, after is not None, *(after or (b"", 0))) + body


def unpack_call(frame: zmq.Frame) -> tuple[CallHead, memoryview]:
    """Return the head of a call, and its body."""
    number, settled, follows, caller, after = _CALL.unpack_from(frame.buffer)
    return (number, settled, (caller, after) if follows else None), frame.buffer[_CALL.size :]


def pack_answer(number: int, body: bytes) -> bytes:
    """Return the first frame of the answer of a call."""
    return _ANSWER.pack(number) + body


def unpack_answer(frame: zmq.Frame) -> tuple[int, memoryview]:
    """Return the number of the call that is answered, and the body of the answer."""
    [number] = _ANSWER.unpack_from(frame.buffer)
    return number, frame.buffer[_ANSWER.size :]
