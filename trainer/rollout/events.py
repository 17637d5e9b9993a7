"""The order of events of an asynchronous run: recorded in a file, followed by a run that resumes or replays it.

Everything else of a run depends on its configuration alone. With the same order, a rollout whose tokens depend only on
weights and seeds, as Megatron's on a CPU, makes the same weights, bit for bit.
"""

from __future__ import annotations

import json
import logging
import os
import random
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from mcontroller.errors import DataError
from trainer.config import AsynchronousConfig

EVENTS = "events.jsonl"
"""The file with the events of a run, one JSON object a line, in the directory of its checkpoints."""

_logger = logging.getLogger(__name__)
T = TypeVar("T")


class EventLog:
    """The events of a run: ``record`` adds one, or compares it with the one that was recorded at its place before.

    A run that continues from a checkpoint follows the events after it, as far as they were recorded before the run
    was interrupted. If they do not fit any more, because the configuration has changed, the rest is dropped.

    Args:
        directory: of the checkpoints.
        resumes: whether an earlier process has recorded events there; otherwise the file is replaced.
        replay: directory of the run whose events are followed; an event that differs is an error then.

    Raises:
        DataError: the directory to replay has no events.
    """

    def __init__(self, directory: Path, *, resumes: bool = False, replay: Path | None = None) -> None:
        self.path, self._resumes = directory / EVENTS, resumes
        self._replayed = None if replay is None else _lines(_events_in(replay))
        self._file: BinaryIO | None = None
        self._ahead: deque[bytes] = deque()
        self._next: Mapping[str, Any] | None = None
        self._count = self._size = self._crc32 = 0

    @property
    def next(self) -> Mapping[str, Any] | None:
        """The event that was recorded at this place before; None: the run goes its own way."""
        self._open()
        if self._ahead and self._next is None:
            self._next = json.loads(self._ahead[0])
        return self._next

    @property
    def count(self) -> int:
        """The number of events so far."""
        return self._count

    def record(self, event: Mapping[str, Any]) -> None:
        """Add an event.

        Raises:
            DataError: it is not the one that the replayed run had.
        """
        self._open()
        assert self._file is not None
        line = json.dumps(event, separators=(",", ":")).encode() + b"\n"
        if self._ahead and self._ahead[0] != line:
            self.diverge(line.decode().strip())
        if self._ahead and self._replayed is None:
            self._file.seek(len(line), os.SEEK_CUR)
        else:
            self._file.write(line)
            self._file.flush()  # survives the death of this process
        if self._ahead:
            self._ahead.popleft()
        self._next = None
        self._count, self._size, self._crc32 = self._count + 1, self._size + len(line), zlib.crc32(line, self._crc32)

    def diverge(self, event: str) -> None:
        """Follow the recorded events no more: this run has come to another one.

        Args:
            event: what this run does, in place of the next event.

        Raises:
            DataError: the run replays another one, whose weights it would not get.
        """
        expected = self._ahead[0].decode().strip()
        if self._replayed is not None:
            raise DataError(
                f"event {self._count} of the replay is {event:.300}; the recorded run has {expected:.300}: replay with "
                "the same configuration, data and version, on the same kind of processor",
                event=self._count,
            )
        _logger.warning("event %d is %.200s; before the interruption it was %.200s", self._count, event, expected)
        assert self._file is not None
        self._ahead.clear()
        self._next = None
        self._file.truncate(self._size)

    def state(self) -> dict[str, int]:
        """Write the file to the disk, and return the place in it for ``restore``."""
        self._open()
        assert self._file is not None
        os.fsync(self._file.fileno())
        return {"count": self._count, "size": self._size, "crc32": self._crc32}

    def restore(self, state: Mapping[str, int]) -> None:
        """Go back to a place of the file, and follow the events after it; an empty state is the beginning.

        Raises:
            DataError: the file is shorter than it was, or has other events.
        """
        self.close()
        self._resumes, self._next = True, None
        self._count, self._size, self._crc32 = (state.get(name, 0) for name in ("count", "size", "crc32"))
        self._open()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _open(self) -> None:
        if self._file is not None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "r+b" if self._resumes and self.path.exists() else "w+b")  # noqa: SIM115
        before = self._file.read(self._size)
        if zlib.crc32(before) != self._crc32:
            raise DataError(
                f"the first {self._size} bytes of {self.path} are not those of the checkpoint: {len(before)} are left, "
                f"with the CRC-32 {zlib.crc32(before)}, expected {self._crc32}. Restore the file, or load an earlier "
                "checkpoint",
                path=str(self.path),
            )
        if self._replayed is not None:
            self._ahead = deque(self._replayed[self._count :])
            self._file.truncate(self._size)
        else:
            self._ahead = deque(_lines(self._file.read()))
            self._file.truncate(self._size + sum(map(len, self._ahead)))  # without half a line of a killed process
        self._file.seek(self._size)


def _events_in(directory: Path) -> bytes:
    """Return the content of the file of events in the directory of a run, or of its checkpoints."""
    files = sorted({*directory.glob(EVENTS), *directory.glob(f"*/{EVENTS}")})
    if len(files) != 1:
        raise DataError(
            f"{directory} has {len(files)} files {EVENTS}, expected one: give the directory of a run with "
            "trainer.max_staleness of 2 or more, or of 1 with responses of several turns",
            path=str(directory),
        )
    return files[0].read_bytes()


def _lines(content: bytes) -> list[bytes]:
    """Return the whole lines."""
    return [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]


class Schedule:
    """When a run makes another slice, and of which responses, if it follows no recorded events.

    Args:
        config: ``schedule`` and ``seed``.
    """

    def __init__(self, config: AsynchronousConfig) -> None:
        self.is_live, self._seed = config.schedule == "live", config.seed

    def goes_on(self, needed: bool, count: int) -> bool:
        """Return whether a slice comes before the next event of the trainer.

        Args:
            needed: whether the trainer cannot go on without it.
            count: of the events so far.
        """
        return needed or (not self.is_live and self._random(count, "goes_on").random() < 0.5)

    def rows(self, live: Sequence[T], capacity: int, count: int) -> Sequence[T]:
        """Return which responses the slice continues: the first ones, or a random part."""
        if self.is_live or not live:
            return live[:capacity]
        chance = self._random(count, "rows")
        return chance.sample(live, chance.randint(1, min(capacity, len(live))))

    def _random(self, count: int, decision: str) -> random.Random:
        """Return random numbers that depend on the place in the order of events alone: a checkpoint has none."""
        return random.Random(f"{self._seed}:{count}:{decision}")
