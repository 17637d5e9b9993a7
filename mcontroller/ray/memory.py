"""Memory of a reader's own for buffers that Ray maps into several processes at once.

A buffer in Ray's object store is a stretch of one file in shared memory, which every reader maps and none may write.
Mapped a second time as private, the same stretch can be written: the kernel gives the writer a copy of a page at its
first write to it, and nobody else sees the change. So nothing is copied that is only read. Where the file cannot be
had (another platform, a small buffer, a buffer outside the store), the buffer is copied.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import psutil

__all__ = ["MAPPED_BYTES", "private_copies"]

MAPPED_BYTES = 1 << 20
"""Below this size a copy is cheaper than a mapping."""

_STORE_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-s ([0-9a-f]+) \S+ (\d+) +/dev/shm/plasma")


def private_copies(buffers: Sequence[Any]) -> list[Any]:
    """Writable memory with the content of each buffer of one object; writing into it is seen by nobody else."""
    views = [memoryview(buffer) for buffer in buffers]
    return _mapped(views) or [bytearray(view) for view in views]


@dataclass(frozen=True, slots=True)
class _Store:
    """Where this process has mapped the object store: addresses ``start`` to ``stop`` are ``inode`` from ``offset`` on.

    The mapping stays for the life of the process; objects that Ray keeps elsewhere (on disk, when the store is full)
    are in mappings that come and go, and are not looked for.
    """

    start: int
    stop: int
    offset: int
    inode: int


class _Mapping(mmap.mmap):
    """A private mapping, which keeps the object that it shows from being evicted."""

    source: Any


def _mapped(views: Sequence[memoryview]) -> list[memoryview] | None:
    """All of them in one mapping, as the buffers of one object lie side by side; None where they are to be copied."""
    if sum([view.nbytes for view in views]) < MAPPED_BYTES or not all([view.readonly for view in views]):
        return None
    store = _store()
    if store is None:
        return None
    places = [np.frombuffer(view, np.uint8).__array_interface__["data"][0] - store.start for view in views]
    first, end = min(places), max([place + view.nbytes for place, view in zip(places, views, strict=True)])
    file = _file(store.inode) if first >= 0 and end <= store.stop - store.start else None
    if file is None:
        return None
    skipped = (first + store.offset) % mmap.ALLOCATIONGRANULARITY
    mapping = _Mapping(
        file,
        end - first + skipped,
        flags=mmap.MAP_PRIVATE,
        prot=mmap.PROT_READ | mmap.PROT_WRITE,
        offset=first + store.offset - skipped,
    )
    mapping.source = views
    whole = memoryview(mapping)
    begins = [place - first + skipped for place in places]
    return [whole[begin : begin + view.nbytes] for begin, view in zip(begins, views, strict=True)]


_known: list[_Store] = []


def _store() -> _Store | None:
    """Found once a process, at the first large buffer: the store is mapped by then."""
    if not _known:
        if not os.path.exists("/proc/self/maps"):
            return None
        with open("/proc/self/maps") as lines:
            found = [match for match in map(_STORE_LINE.match, lines) if match]
        _known.extend(_parse(match) for match in found[:1])
    return _known[0] if _known else None


def _parse(line: re.Match[str]) -> _Store:
    start, stop, offset = (int(text, 16) for text in line.groups()[:3])
    return _Store(start, stop, offset, int(line[4]))


@cache
def _file(inode: int) -> int | None:
    """The store's file, which has no name any more, through the raylet that keeps it open; None where it is barred."""
    for process in _raylets():
        with suppress(OSError):  # a raylet of another user bars its files, and any may close one while we look
            for entry in os.scandir(f"/proc/{process}/fd"):
                if os.readlink(entry.path).startswith("/dev/shm/plasma") and os.stat(entry.path).st_ino == inode:
                    return os.open(entry.path, os.O_RDONLY)
    return None


def _raylets() -> Iterator[int]:
    """Every raylet of this machine; a worker's own is its parent."""
    yield os.getppid()
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == "raylet":
            yield process.pid
