"""Record what a process does: events with a name, a begin and an end, kept in a list and appended to a file.

``recording(directory)`` records this process, and the ranks of groups that are started while it is open. Without it,
every hook costs one look at a variable. The file of a process is ``<lane>.jsonl.gz``: a line describes the process, and
each other line is a column for each field of the events since the line before. A process that is killed leaves a
readable file without its last seconds.

A file is bounded: when it has ``SEGMENT_BYTES``, it becomes ``<lane>.old.jsonl.gz`` and a new one begins. The oldest
events are lost with the file that was there before; between one and two segments of the newest events remain.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mcontroller.machine import boot_id
from parallel_state.hangs.waits import waited

FOLDER = "trace"
"""The folder of the trace in the directory of a run."""
SUFFIX, OLD = ".jsonl.gz", ".old"
"""The end of the name of a file, and what is before it in the name of a full one."""
CONTROLLER = "controller"
"""The lane of the process that calls groups."""
MEMORY = "memory"
"""The event with the memory of a process after a call, its number [MB]."""
DATA = "data "
"""The begin of the name of the event in which a process gets the result of a call, numbered as the call; then comes
``about["actor"]`` of the process that has it."""
SEGMENT_BYTES = 1_000_000
FLUSH_NS = 2_000_000_000
"""[ns] ``flush_if_due`` writes the events that have been recorded for so long."""

now = time.monotonic_ns
_logger = logging.getLogger(__name__)


class TraceRecorder:
    """The events of one lane: the controller, or a rank.

    Args:
        directory: the folder of the trace.
        lane: the name of the file.
        about: what is written of the process, such as the coordinates of its rank.
        segment: bytes after which a new file begins.

    Attributes:
        directory: as passed.
        about: as passed, with the node and the process.
        deferred: functions that add events which are not known yet, such as times of a GPU; called before a flush.
        ranks: the recorders of ranks in this process, by role and rank.
    """

    def __init__(self, directory: Path, lane: str, about: Mapping[str, Any], segment: int = SEGMENT_BYTES) -> None:
        self.directory = directory
        process = {"pid": os.getpid(), "boot": boot_id(), "time_us": time.time_ns() // 1000 - now() // 1000}
        self.about: dict[str, Any] = {"lane": lane, "node": socket.gethostname(), **process, **about}
        self.deferred: list[Callable[[], None]] = []
        self.ranks: dict[tuple[str, int], TraceRecorder] = {}
        self._path, self._segment = directory / f"{quote(lane, safe='')}{SUFFIX}", segment
        self._events: deque[tuple[str, int, int, int, int]] = deque()
        self._flushed, self._written, self._described = now(), 0, False
        self._deflate = zlib.compressobj(6, wbits=31)
        self._failed = False
        self._lock = threading.Lock()

    def describe(self, **about: Any) -> None:
        """Change what is written of the process."""
        self.about |= about
        self._described = False

    def add(self, name: str, begin: int, end: int, number: int = -1, waiting: int = 0) -> None:
        """Add an event; takes well under a microsecond.

        Args:
            name: what was done; the begin of the name up to the first space is its category.
            begin: by ``time.monotonic_ns``.
            end: as ``begin``.
            number: of the call, the step or the micro-batch.
            waiting: [ns] how long this thread waited for other ranks meanwhile.
        """
        self._events.append((name, begin, end, waiting, number))

    def mark(self, name: str, number: int = -1) -> None:
        """Add an event without a duration, such as a failure, and write everything."""
        self.add(name, at := now(), at, number)
        self.flush()

    def flush_if_due(self) -> None:
        """Write the events, if the last write is some seconds ago."""
        if now() - self._flushed > FLUSH_NS:
            self.flush()

    def write_in_background(self) -> threading.Event:
        """Write while this thread waits too, for those who look at the run meanwhile, until the event is set."""
        ended = threading.Event()

        def write() -> None:
            while not ended.wait(FLUSH_NS / 1e9):
                self.flush(resolve=False)

        threading.Thread(target=write, name="trace", daemon=True).start()
        return ended

    def flush(self, *, resolve: bool = True) -> None:
        """Append the events to the file; after an error of the file, which is logged, drop them.

        Args:
            resolve: add those that are not known yet, which may wait for a GPU.
        """
        with self._lock:
            for entry in self.deferred if resolve else ():
                entry()
            if resolve:
                self.deferred.clear()
            events = [self._events.popleft() for _ in range(len(self._events))]  # others may be added meanwhile
            self._flushed = now()
            if not events or self._failed:
                return
            try:
                self._write(sorted(events, key=lambda event: event[1]))
            except OSError as error:  # a full disk must not end the run
                self._failed = True
                _logger.warning("%s is not continued: %s", self._path, error)

    def _write(self, events: list[tuple[str, int, int, int, int]]) -> None:
        rows, last = [], 0
        for name, begin, end, waiting, number in events:
            took = end // 1000 - begin // 1000  # an event inside another stays inside
            rows.append((name, begin // 1000 - last, took, waiting // 1000, number))
            last = begin // 1000
        lines: list[Any] = [list(zip(*rows, strict=True))]
        if not self._described:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lines.insert(0, self.about)
            self._described = True
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        data = self._deflate.compress(text.encode()) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        with open(self._path, "ab") as file:
            file.write(data)
        self._written += len(data)
        if self._written >= self._segment:
            self._begin_segment()

    def _begin_segment(self) -> None:
        with open(self._path, "ab") as file:
            file.write(self._deflate.flush())
        os.replace(self._path, self._path.with_name(self._path.name.removesuffix(SUFFIX) + OLD + SUFFIX))
        self._deflate = zlib.compressobj(6, wbits=31)
        self._written, self._described = 0, False


class _Current(threading.local):
    recorder: TraceRecorder | None = None


_current = _Current()


def recorder() -> TraceRecorder | None:
    """Return the recorder of this thread's rank, or of this process; None if nothing is recorded."""
    return _current.recorder


def set_recorder(new: TraceRecorder | None) -> None:
    """Record all threads of this process, or none."""
    _Current.recorder = new


@contextlib.contextmanager
def recording(directory: Path | str) -> Iterator[TraceRecorder]:
    """Record this process as the controller while the block runs, and the ranks of groups that start in it.

    Args:
        directory: the directory of the run, which all nodes share; the files are in its folder ``trace``.
    """
    lane = f"{CONTROLLER}-{os.getpid()}-{time.time_ns() // 1_000_000}"
    made = TraceRecorder(Path(directory).resolve() / FOLDER, lane, {"group": CONTROLLER, "rank": 0})
    before = _Current.recorder
    set_recorder(made)
    ended = made.write_in_background()
    try:
        yield made
    except BaseException as error:
        made.mark(f"failure {type(error).__name__}")
        raise
    finally:
        ended.set()
        for entry in (made, *made.ranks.values()):
            entry.flush()
        set_recorder(before)


@contextlib.contextmanager
def on_rank(role: str, rank: int, coordinates: Mapping[str, int]) -> Iterator[None]:
    """Record this thread as a rank of a group in this process while the block runs, if this process is recorded."""
    process = _Current.recorder
    if process is None:
        yield
        return
    roles = {role: dict(coordinates)}
    made = process.ranks.get((role, rank))
    if made is None:
        launch = f"{role}-{process.about['lane'].removeprefix(CONTROLLER + '-')}"
        about = {"group": role, "rank": rank, "launch": launch}
        made = process.ranks[role, rank] = TraceRecorder(process.directory, f"{launch}-{rank}", about)
    if made.about.get("roles") != roles:
        made.describe(roles=roles)
    before, _current.recorder = _current.recorder, made
    try:
        yield
    finally:
        _current.recorder = before
        made.flush_if_due()


class PhaseTimer:
    """The parts of one operation that follow each other: each call adds the time since the call before as an event.

    ``start_timer`` makes them.

    Args:
        recorder: gets the events; None: nothing does.
        what: ends the names of the events.
        number: of the operation.
    """

    __slots__ = ("_last", "_recorder", "_waited", "_what", "number")

    def __init__(self, recorder: TraceRecorder | None, what: str, number: int) -> None:
        self._recorder, self._what, self.number = recorder, what, number
        self._waited, self._last = waited.nanoseconds, now()

    def __call__(self, name: str) -> None:
        """Add the event."""
        if self._recorder is not None:
            end, waiting = now(), waited.nanoseconds
            name = f"{name} {self._what}" if self._what else name
            self._recorder.add(name, self._last, end, self.number, waiting - self._waited)
            self._waited, self._last = waiting, end

    def end(self) -> None:
        """Write the events of the process, if that is due."""
        if self._recorder is not None:
            self._recorder.flush_if_due()


_SILENT = PhaseTimer(None, "", -1)


def start_timer(what: str = "", number: int = -1) -> PhaseTimer:
    """Return the timer of an operation that begins now; if nothing is recorded, the same one for all operations."""
    recorder = _current.recorder
    return _SILENT if recorder is None else PhaseTimer(recorder, what, number)


@contextlib.contextmanager
def span(name: str, number: int = -1) -> Iterator[None]:
    """Add an event with the time of the block, also if it raises."""
    timer = start_timer(number=number)
    try:
        yield
    finally:
        timer(name)
