"""Standard output that cannot be written does not end what is running: a closed pipe, a full disk, an encoding."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TextIO

from mcontroller.errors import MControllerError

_logger = logging.getLogger(__name__)


def printable(text: str) -> str:
    """Return a text of another program with its control characters as escapes: a terminal would obey them."""
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs") else ascii(char)[1:-1]
        for char in text
    )


def output_file(text: str) -> Path:
    """Return the path of a file that a program writes at its end; argparse reports at the start if it cannot."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: expected a file in a directory that exists")
    return path


@contextlib.contextmanager
def progress_bar(text: str, total: int | None = None) -> Iterator[Callable[..., object]]:
    """Show a progress bar on standard error, a terminal; the block changes it, as by ``update(completed=3)``."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield partial(bar.update, bar.add_task(text, total=total), refresh=True)


class OutputError(MControllerError):
    """Standard output cannot be written; the cause is the error of the system, such as a BrokenPipeError."""


class Output(io.TextIOBase):
    """A text stream over another one. After the first failure of that one, what is written to this is dropped.

    Characters that the encoding lacks are written as escapes.

    Args:
        stream: the other stream; None: what ``sys.stdout`` is at each call.
        required: raise OutputError at the first failure, for a program whose result is what it prints; otherwise the
            failure is logged.
    """

    def __init__(self, stream: TextIO | None = None, *, required: bool = False) -> None:
        super().__init__()
        self._stream = stream._stream if isinstance(stream, Output) else stream
        self._required = required
        self._failed = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the other stream."""
        return getattr(self._target(), "encoding", None) or "utf-8"

    def writable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """Return whether the other stream is a terminal."""
        stream = self._target()
        return not self._failed and stream is not None and not stream.closed and stream.isatty()

    def fileno(self) -> int:
        """Return the descriptor of the other stream."""
        stream = self._target()
        if stream is None:
            raise io.UnsupportedOperation("fileno")
        return stream.fileno()

    def write(self, text: str, /) -> int:
        """Write a text, and return its length."""
        stream = self._target()
        if stream is not None and not self._failed:
            try:
                stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
            except (OSError, ValueError) as error:
                self._fail(stream, error)
        return len(text)

    def flush(self) -> None:
        """Pass what was written to the system. Of a closed stream nothing is left: also when this is collected."""
        stream = self._target()
        if stream is not None and not self._failed and not stream.closed:
            try:
                stream.flush()
            except (OSError, ValueError) as error:
                self._fail(stream, error)

    def _target(self) -> TextIO | None:
        return self._stream if self._stream is not None else sys.stdout

    def _fail(self, stream: TextIO, error: Exception) -> None:
        self._failed = True
        if not stream.closed:
            try:
                descriptor = stream.fileno()
            except OSError:  # it has none
                pass
            else:  # the interpreter flushes what is left at its end
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, descriptor)
                os.close(null)
        if self._required:
            raise OutputError(f"the output cannot be written: {error}") from error
        _logger.warning("the output cannot be written, and nothing more is printed: %s", error)
