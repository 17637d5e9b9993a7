"""The record of a process's last collectives: memory without a name, readable while the process is frozen.

The memory is a file that exists only as an open descriptor (``memfd_create``). Others of the same user open it as
``/proc/<pid>/fd/<number>``, and it is gone when the process ends. It contains numbers of 8 bytes, then texts:

* a header,
* a ring of the last calls,
* a row for each channel, which counts its calls: the collectives of a group, or the transfers on one of its routes,
* texts, each with its length, to which the numbers refer by their offset.

No torch: a controller and the tasks that read a record do not need it.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel_state.hangs.lines import call_text, group_text

RING = 64
"""Calls that are kept."""

IN_CALL, RETURNED, WAITING, DONE = range(4)
"""States of a call: torch has not returned yet; it has; the program waits; the wait is over."""

_MAGIC = 0x4D43524543303031
RING_AT, SLOT, DIMS = 8, 16, 5
"""Position of the ring behind the header; numbers of a call in it; sizes of its first tensor that it has."""

_CHANNEL, _CHANNELS = 8, 512
_CHANNELS_AT = RING_AT + RING * SLOT
_TEXTS_AT = 8 * (_CHANNELS_AT + _CHANNELS * _CHANNEL)
_TEXT_BYTES = 1 << 22
_LENGTH = struct.Struct("<q")

KINDS = ("collective", "send", "recv")


class RecordMemory:
    """The memory that a process writes its record to.

    Attributes:
        descriptor: the open descriptor, by which others find the memory.
        numbers: the numbers.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("collectives")
        os.ftruncate(self.descriptor, _TEXTS_AT + _TEXT_BYTES)
        self._memory = mmap.mmap(self.descriptor, _TEXTS_AT + _TEXT_BYTES)
        self.numbers = memoryview(self._memory)[:_TEXTS_AT].cast("q")
        self._texts: dict[str, int] = {}
        self._end = 0
        self._channels = 0
        self.unknown = self.text("(unknown)")
        self.numbers[0], self.numbers[1] = _MAGIC, -1

    def set_rank(self, rank: int) -> None:
        """Set the global rank of the process in torch.distributed."""
        self.numbers[1] = rank

    def text(self, text: str) -> int:
        """Return the offset of a text; write it if it is new and there is room."""
        offset = self._texts.get(text)
        if offset is None:
            content = text.encode()
            if self._end + _LENGTH.size + len(content) > _TEXT_BYTES:
                return self.unknown
            offset, start = self._end, _TEXTS_AT + self._end
            self._memory[start + _LENGTH.size : start + _LENGTH.size + len(content)] = content
            self._memory[start : start + _LENGTH.size] = _LENGTH.pack(len(content))
            self._end += _LENGTH.size + len(content)
            self._texts[text] = offset
        return offset

    def channel(self, kind: str, group: RecordedGroup, peer: int, tag: int) -> int | None:
        """Add a channel and return the index of its count; None if there is no room for it.

        Args:
            kind: one of ``KINDS``.
            group: the group.
            peer: of a transfer, the global rank of the other side; -1 for any.
            tag: of a transfer, its tag.
        """
        described = self.text(json.dumps([group.name, group.description, list(group.ranks), group.backend]))
        if self._channels == _CHANNELS or described == self.unknown:
            return None
        at = _CHANNELS_AT + self._channels * _CHANNEL
        values = (0, KINDS.index(kind), described, peer, tag)
        for index, value in enumerate(values):
            self.numbers[at + index] = value
        self._channels += 1
        self.numbers[2] = self._channels
        return at


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """A process group.

    Attributes:
        name: the name that torch gave it.
        description: ``group_desc`` of ``new_group``; Megatron's name of the group.
        ranks: the global ranks of the members.
        backend: such as ``"nccl"``.
    """

    name: str
    description: str
    ranks: tuple[int, ...]
    backend: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """What a call is counted on: the collectives of a group, or the transfers on one of its routes.

    Attributes:
        kind: one of ``KINDS``.
        group: the group.
        peer: of a transfer, the global rank of the other side; -1 for any.
        tag: of a transfer, its tag.
    """

    kind: str
    group: RecordedGroup
    peer: int = -1
    tag: int = 0


@dataclass(frozen=True, slots=True)
class LastCall:
    """One of the last calls.

    Attributes:
        number: its number among the calls of the process.
        route: what it is counted on.
        index: its number on the route.
        operation: the name in torch.distributed.
        tensors: dtype and shape of the first tensor, and the number of tensors if there are more.
        details: such as ``op=SUM``.
        line: the line of the program.
        state: ``IN_CALL``, ``RETURNED``, ``WAITING`` or ``DONE``.
    """

    number: int
    route: Route
    index: int
    operation: str
    tensors: tuple[str, ...]
    details: tuple[str, ...]
    line: str
    state: int

    def text(self, axis: str = "") -> str:
        """Return the call as reports show it, with the axes of its group."""
        group = self.route.group
        number, peer = (self.index, None) if self.route.kind == "collective" else (-1, self.route.peer)
        peer = None if peer == -1 else peer
        shown = group_text(group.name, group.description, group.ranks, axis)
        return call_text(self.operation, self.tensors, self.details, shown, number, peer)


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The record of a process.

    Attributes:
        rank: its global rank in torch.distributed; -1 before its first call.
        calls: the last calls, the oldest first.
        counts: the number of calls on each route.
    """

    rank: int
    calls: tuple[LastCall, ...]
    counts: dict[Route, int]


def read_rank_record(pid: int, descriptor: int) -> RankRecord | None:
    """Read the record of a process of the same user on this machine, even if it is frozen.

    Returns:
        The record; None if the process has ended or may not be read.
    """
    try:
        content = Path(f"/proc/{pid}/fd/{descriptor}").read_bytes()
    except OSError:
        return None
    if len(content) != _TEXTS_AT + _TEXT_BYTES:
        return None
    numbers = memoryview(content)[:_TEXTS_AT].cast("q")
    if numbers[0] != _MAGIC:
        return None
    texts = memoryview(content)[_TEXTS_AT:]
    routes: list[Route] = []
    counts: dict[Route, int] = {}
    for at in range(_CHANNELS_AT, _CHANNELS_AT + numbers[2] * _CHANNEL, _CHANNEL):
        count, kind, group, peer, tag = numbers[at : at + 5]
        name, description, ranks, backend = json.loads(_text(texts, group))
        routes.append(Route(KINDS[kind], RecordedGroup(name, description, tuple(ranks), backend), peer, tag))
        counts[routes[-1]] = counts.get(routes[-1], 0) + count
    slots = (numbers[at : at + SLOT].tolist() for at in range(RING_AT, _CHANNELS_AT, SLOT))
    calls = [_call(slot, routes, texts) for slot in slots if slot[0]]
    return RankRecord(numbers[1], tuple(sorted(calls, key=lambda call: call.number)), counts)


def _call(slot: Sequence[int], routes: Sequence[Route], texts: memoryview) -> LastCall:
    number, channel, index, operation, details, line, state, count, dtype, dims, *sizes = slot
    tensors: tuple[str, ...] = ()
    if count:
        shape = ", ".join(map(str, sizes[: min(dims, DIMS)])) + (", ..." if dims > DIMS else "")
        tensors = (f"{_text(texts, dtype)}[{shape}]",)
    if count > 1:
        tensors += (f"... {count} tensors",)
    detail = _text(texts, details)
    place = _text(texts, line)
    route = routes[(channel - _CHANNELS_AT) // _CHANNEL]
    shown = (detail,) if detail else ()
    return LastCall(number - 1, route, index, _text(texts, operation), tensors, shown, place, state)


def _text(texts: memoryview, offset: int) -> str:
    (length,) = _LENGTH.unpack_from(texts, offset)
    return bytes(texts[offset + _LENGTH.size : offset + _LENGTH.size + length]).decode()
