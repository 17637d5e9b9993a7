"""The output of every rank in a file of its own: written with the time of each line, found by rank, and merged.

A process of each rank gets what the rank writes to its standard output and error, native code included. It passes
everything on to where it went before (Ray's files, from which Ray prints lines in the driver, and folds equal ones),
and adds it to the file of the rank. It outlives the rank, so that the file has the last line before a crash.

This file runs as a script without any package: at its start, it imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

MAX_LINE = 1 << 16
"""Bytes of a line; longer ones, and the updates of a progress bar, are cut."""

_NAME = re.compile(r"(?P<role>.+)-rank(?P<rank>\d+)(?P<axes>(-[a-z_]+\d+)*)\.log")
_WARNING = re.compile(r"\S+\.py:\d+: \w*Warning: ")
_IMPORTED = re.compile(r"/(site|dist)-packages/")

_STAMP = len("2026-11-25 18:00:00.000000")


class RankLog(NamedTuple):
    """The file of a rank.

    Attributes:
        path: its path.
        role: the group that the rank is of.
        rank: the rank.
        coordinates: its index on each axis; empty if its worker has not reported them.
    """

    path: Path
    role: str
    rank: int
    coordinates: Mapping[str, int]

    @classmethod
    def open(cls, directory: str, role: str, rank: int) -> RankLog | None:
        """Copy the output of this process to the file of its rank, from now on; those of earlier starts stay in it.

        Returns:
            None, after a warning, if this node cannot write into the directory.
        """
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            earlier = [log for log in find_logs(Path(directory)) if (log.role, log.rank) == (role, rank)]
            log = earlier[0] if earlier else cls(Path(directory, f"{_file_name(role)}-rank{rank}.log"), role, rank, {})
            log.path.touch()
        except OSError as error:
            text = "%s rank %d has no file of its output in %s: %s. Ray's files of the process have it"
            logging.getLogger(__name__).warning(text, role, rank, directory, error)
            return None
        pipes = [os.pipe(), os.pipe()]
        reads = [read for read, _ in pipes]
        command = [sys.executable, "-I", "-S", __file__, str(log.path), *map(str, reads)]
        subprocess.run(command, pass_fds=reads, check=True)  # it has forked the process that copies
        for number, (read, write) in enumerate(pipes, start=1):
            os.dup2(write, number)
            os.close(read)
            os.close(write)
        return log

    def rename(self, coordinates: Mapping[str, int]) -> None:
        """Add the coordinates of the rank to the name of its file."""
        axes = "".join(f"-{axis}{index}" for axis, index in coordinates.items())
        os.replace(self.path, self.path.with_name(f"{_file_name(self.role)}-rank{self.rank}{axes}.log"))

    def tail(self, lines: int) -> list[str]:
        """Return the last lines, without warnings of imports."""
        with open(self.path, "rb") as file:
            file.seek(max(0, self.path.stat().st_size - MAX_LINE))
            lines_of_file = file.read().decode(errors="replace").splitlines()
        return without_import_warnings(lines_of_file)[-lines:]

    def __str__(self) -> str:
        axes = " ".join(f"{axis}={index}" for axis, index in self.coordinates.items())
        return f"{self.role} rank {self.rank}" + (f" ({axes})" if axes else "")


class LogLine(NamedTuple):
    """A line of a rank.

    Attributes:
        time: when it was written, by the clock of its node.
        log: the file of the rank.
        text: the line.
    """

    time: str
    log: RankLog
    text: str


def find_logs(directory: Path) -> list[RankLog]:
    """Return the files of ranks in a directory, by role and rank."""
    logs = []
    for path in directory.glob("*.log"):
        if match := _NAME.fullmatch(path.name):
            axes = re.findall(r"-([a-z_]+)(\d+)", match["axes"])
            role = match["role"].replace("%2F", "/").replace("%25", "%")
            logs.append(RankLog(path, role, int(match["rank"]), {axis: int(index) for axis, index in axes}))
    return sorted(logs, key=lambda log: (log.role, log.rank))


def _file_name(role: str) -> str:
    """Return a role as part of the name of a file, as in a URL; ``find_logs`` reads it."""
    return role.replace("%", "%25").replace("/", "%2F")


def merged_lines(logs: Sequence[RankLog], offsets: dict[str, int]) -> Iterator[LogLine]:
    """Yield the complete lines of files that have not been read yet, by time.

    Args:
        logs: the files.
        offsets: bytes that have been read, by role and rank; this function adds to them.
    """

    def lines(log: RankLog) -> Iterator[LogLine]:
        key = f"{log.role}-{log.rank}"
        with open(log.path, "rb") as file:
            if offsets.get(key, 0) > os.fstat(file.fileno()).st_size:  # truncated: what follows is new
                offsets[key] = 0
            file.seek(offsets.get(key, 0))
            for line in file:
                if not line.endswith(b"\n"):
                    break
                offsets[key] = offsets.get(key, 0) + len(line)
                text = line[:-1].decode(errors="replace")
                yield LogLine(text[:_STAMP], log, text[_STAMP + 1 :])

    return heapq.merge(*map(lines, logs), key=lambda line: line.time)


def without_import_warnings(lines: Sequence[str]) -> list[str]:
    """Return lines of a log without the warnings of installed packages, and the line of code below each of them."""
    kept, code_follows = [], False
    for line in lines:
        text = line[_STAMP + 1 :] if re.match(r"\d{4}-\d\d-\d\d ", line) else line
        is_warning = bool(_WARNING.search(text) and _IMPORTED.search(text))
        if not is_warning and not (code_follows and text.startswith("  ")):
            kept.append(line)
        code_follows = is_warning
    return kept


def _copy(path: str, reads: Sequence[int]) -> None:
    """Copy what arrives at two pipes to the standard output and error, and with times to a file, until both end."""
    target = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    rest = dict.fromkeys(reads, b"")
    with selectors.DefaultSelector() as pipes:
        for number, read in enumerate(reads, start=1):
            pipes.register(read, selectors.EVENT_READ, number)
        while pipes.get_map():
            for key, _ in pipes.select():
                data = os.read(key.fd, MAX_LINE)
                now, fraction = divmod(time.time_ns() // 1000, 1_000_000)
                stamp = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))}.{fraction:06} ".encode()
                *lines, last = (rest[key.fd] + data).split(b"\n")
                if last and (not data or len(last) >= MAX_LINE):
                    lines, last = [*lines, last], b""
                rest[key.fd] = last
                with contextlib.suppress(OSError):  # a full disk must not stop the rank
                    _write(key.data, data)
                with contextlib.suppress(OSError):
                    _write(target, b"".join(stamp + line + b"\n" for line in lines))
                if not data:
                    pipes.unregister(key.fd)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__" and os.fork() == 0:  # no child of the rank: Ray ends those with it
    os.setsid()
    os.close(0)
    _copy(sys.argv[1], [int(descriptor) for descriptor in sys.argv[2:]])
