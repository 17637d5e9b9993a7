"""Local connections: messages between two processes of one machine, over a Unix socket and shared memory.

A message is one packet, which goes from the thread that sends it to the one that receives it: no further thread takes
part, and nothing is encrypted, because the kernel passes packets to nobody but the other side. The frames of a large
call are written once into memory that the controller shares with all its ranks on the machine, and each rank copies
them from there: memory that is used again costs much less than the new memory of a large packet.

A local connection never waits. What it cannot take now goes over ZeroMQ, which keeps any number of messages for a
process that does not read. Calls have places (see ``order``), so it does not matter which one arrives first.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from typing_extensions import Buffer

from mcontroller.errors import DataError

__all__ = ["LocalConnection", "LocalMemory", "OutgoingMessage"]

SHARED_BYTES = 16 * 1024
"""[bytes] Messages above this size are written into shared memory, if there is some.

Measured with 8 ranks that all get a value, on 2 cores, in shared memory and in packets: 0.59 and 0.56 ms for 4 KiB,
0.57 and 0.58 ms for 16 KiB, 0.58 and 0.81 ms for 60 KiB."""

PACKET_BYTES = 64 * 1024
"""[bytes] Largest message in a packet."""

MEMORY_BYTES = 64 * 1024 * 1024
"""[bytes] Size of the memory of a controller. Only what has been used takes memory of the machine."""

MOST_FRAMES = 1024
"""Most frames of a message; one with more goes over ZeroMQ."""

_ALIGNMENT = 64
_ONE, _SEVERAL, _SHARED = b"\0", b"\1", b"\2"
"""The first byte of a packet: one frame; the number and sizes of frames, and the frames; or the place of frames in
shared memory, and their sizes."""

_COUNT = struct.Struct("<H")
_PLACE = struct.Struct("<QH")
_RECEIVED_BYTES = PACKET_BYTES + 8 * MOST_FRAMES + 64


class _Region:
    """A part of a ``LocalMemory``, which is free again when this object is garbage-collected."""

    __slots__ = ("_freed", "offset")

    def __init__(self, offset: int, freed: deque[int]) -> None:
        self.offset = offset
        self._freed = freed

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # an interrupt has ended __init__
            self._freed.append(self.offset)


class LocalMemory:
    """Memory of one process that other processes of the machine read. Used by one thread at a time.

    Attributes:
        descriptor: the descriptor to pass to the readers.

    Raises:
        OSError: there is no such memory, or no free descriptor.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("mcontroller calls", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, MEMORY_BYTES)
        self._memory = mmap.mmap(self.descriptor, MEMORY_BYTES)
        self._ends: dict[int, int] = {}
        self._freed: deque[int] = deque()

    def write(self, frames: Sequence[bytes]) -> _Region | None:
        """Write frames one after another, at the first free place; return None if there is none."""
        while self._freed:
            self._ends.pop(self._freed[0], None)
            self._freed.popleft()
        size = sum(map(len, frames))
        offset = 0
        for begin, end in sorted(self._ends.items()):
            if begin - offset >= size:
                break
            offset = end
        if offset + size > MEMORY_BYTES:
            return None
        region = _Region(offset, self._freed)  # before the place is taken: an interrupt frees it again
        self._ends[offset] = -(-(offset + max(size, 1)) // _ALIGNMENT) * _ALIGNMENT
        position = offset
        for frame in frames:
            self._memory[position : position + len(frame)] = frame
            position += len(frame)
        return region

    def close(self) -> None:
        """Close the memory. A second call does nothing."""
        if not self._memory.closed:
            self._memory.close()
            os.close(self.descriptor)


class OutgoingMessage:
    """The frames of a message, bytes, and its packet, made once for all receivers.

    What it has in shared memory stays there as long as this object exists.
    """

    __slots__ = ("_packet", "_region", "frames")

    def __init__(self, frames: Sequence[bytes]) -> None:
        self.frames = frames
        self._packet: bytes | None = None
        self._region: _Region | None = None

    def packet(self, memory: LocalMemory | None) -> bytes | None:
        """Return the packet; None if the message must go over ZeroMQ.

        Args:
            memory: the shared memory of this process, if it has some; always the same.
        """
        if self._packet is None:
            self._packet = self._make(memory)
        return self._packet

    def _make(self, memory: LocalMemory | None) -> bytes | None:
        if len(self.frames) == 1 and len(self.frames[0]) <= SHARED_BYTES:
            return b"".join([_ONE, self.frames[0]])
        if len(self.frames) > MOST_FRAMES:
            return None
        sizes = [len(frame) for frame in self.frames]
        packed_sizes = struct.pack(f"<{len(sizes)}Q", *sizes)
        if memory is not None and sum(sizes) > SHARED_BYTES:
            self._region = memory.write(self.frames)
            if self._region is not None:
                return _SHARED + _PLACE.pack(self._region.offset, len(sizes)) + packed_sizes
        if sum(sizes) <= PACKET_BYTES:
            return b"".join([_SEVERAL, _COUNT.pack(len(sizes)), packed_sizes, *self.frames])
        return None


class LocalConnection:
    """One side of a connection. Its methods do not wait.

    Args:
        connected: the Unix socket, of type SOCK_SEQPACKET; it is closed with this object.
        memory: the descriptor of the ``LocalMemory`` of the other side, or None. It is not closed.

    Attributes:
        write: sends a packet. Raises OSError if the other side has many unread packets, or is gone (ConnectionError).

    Raises:
        OSError: the memory cannot be mapped.
    """

    def __init__(self, connected: socket.socket, memory: int | None = None) -> None:
        connected.setblocking(False)
        self.write: Callable[[bytes], int] = connected.send  # of the socket itself, because every call pays for it
        self._socket = connected
        self._received = memoryview(bytearray(_RECEIVED_BYTES))
        self._memory = None if memory is None else memoryview(mmap.mmap(memory, 0, prot=mmap.PROT_READ))

    def fileno(self) -> int:
        """Return the descriptor to poll for reading; -1 if the connection was closed."""
        return self._socket.fileno()

    def receive(self) -> list[Buffer] | None:
        """Return the frames of the next message, those after the first in memory of their own; None if none is there.

        Raises:
            ConnectionError: the other side has closed the connection.
            DataError: the other side has sent something that is not a message.
        """
        try:
            size = self._socket.recv_into(self._received)
        except BlockingIOError:
            return None
        packet = bytes(self._received[:size])
        if packet.startswith(_ONE):
            return [memoryview(packet)[1:]]
        if not packet:
            raise ConnectionResetError("the other side has closed the connection")
        return self._frames(packet)

    def _frames(self, packet: bytes) -> list[Buffer]:
        """Return the frames of a packet that has several, or that are in memory; see ``receive``."""
        try:
            if packet.startswith(_SHARED):
                begin, count = _PLACE.unpack_from(packet, 1)
                source, head = self._memory or memoryview(b""), 1 + _PLACE.size
            else:
                [count] = _COUNT.unpack_from(packet, 1)
                source, head = memoryview(packet), 1 + _COUNT.size
                begin = head + 8 * count
            sizes = struct.unpack_from(f"<{count}Q", packet, head)
        except struct.error:
            raise DataError(f"a packet of {len(packet)} bytes is too short for its head", found=len(packet)) from None
        ends = list(accumulate(sizes, initial=begin))
        if not sizes or packet[:1] not in (_SEVERAL, _SHARED) or ends[-1] > source.nbytes:
            raise DataError(
                f"a packet of {len(packet)} bytes has {count} frames up to byte {ends[-1]} of {source.nbytes}",
                found=source.nbytes,
                expected=ends[-1],
            )
        return [bytearray(source[start:end]) for start, end in pairwise(ends)]

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        with contextlib.suppress(OSError):
            self._socket.close()
