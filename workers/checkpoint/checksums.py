"""Checksums of a checkpoint's files: computed as they are written, and verified by all ranks together."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from mcontroller.errors import DataError
from parallel_state.agreement import raise_on_every_rank

_CHUNK = 1 << 22


class FileEntry(TypedDict):
    """A file of a checkpoint in its manifest."""

    size: int
    """[bytes] Its length."""
    sha256: str
    """Its SHA-256, in hexadecimal: the one that ``sha256sum`` prints."""


class NewFile(io.RawIOBase):
    """A file that is written from its start to its end, and the checksum of what was written.

    The first error of the file system is kept in ``error``, because writers of other packages hide it behind theirs.

    Args:
        file: its path, or a descriptor, which is closed with it and has no checksum.
    """

    def __init__(self, file: str | os.PathLike[str] | int) -> None:
        super().__init__()
        self._hash = None if isinstance(file, int) else hashlib.sha256()
        self._file = open(file, "wb")  # noqa: SIM115 - closed by ``close``
        self._size = 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any, /) -> int:
        """Write all of ``data`` and return its length."""
        view = memoryview(data).cast("B")
        try:
            self._file.write(view)
        except OSError as error:
            self.error = self.error or error
            raise
        if self._hash is not None:
            self._hash.update(view)
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._size

    def flush(self) -> None:
        """Pass what was written to the system."""
        if not self._file.closed:
            self._file.flush()

    def finish(self) -> FileEntry:
        """Flush a file with a path to the disk, and return its length and checksum."""
        assert self._hash is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"size": self._size, "sha256": self._hash.hexdigest()}

    def fileno(self) -> int:
        """Return its descriptor."""
        return self._file.fileno()

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            try:
                self._file.close()
            finally:
                super().close()


def file_entry(path: Path) -> FileEntry:
    """Return the length and the checksum of a file on the disk.

    Raises:
        OSError: it cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return {"size": size, "sha256": digest.hexdigest()}


def verify_files(checkpoint: Path, files: Mapping[str, FileEntry], rank: int, world_size: int) -> None:
    """Compare the files of a checkpoint with its manifest, each rank a part of them (a collective).

    Args:
        checkpoint: its directory.
        files: of its manifest; empty if it was saved by a version without checksums.
        rank: of this process.
        world_size: the number of processes that share the work.

    Raises:
        DataError: on every rank, if a file is missing, or has another length or checksum; names the file.
    """
    largest_first = sorted(files, key=lambda name: (-files[name]["size"], name))
    loads = [0] * world_size
    mine = []
    for name in largest_first:
        least = loads.index(min(loads))
        loads[least] += files[name]["size"] + 1
        if least == rank:
            mine.append(name)

    def verify() -> None:
        for name in mine:
            _verify_file(checkpoint, name, files[name])

    raise_on_every_rank(verify)


def _verify_file(checkpoint: Path, name: str, expected: FileEntry) -> None:
    path = checkpoint / name
    try:
        size = path.stat().st_size
        found = file_entry(path) if size == expected["size"] else None
    except OSError as error:
        text = f"the checkpoint {str(checkpoint)!r} is damaged: {name} cannot be read: {error}"
        raise DataError(text, path=str(path)) from error
    if found is None:
        reason = f"{name} has {size} bytes, expected {expected['size']}"
    elif found != expected:
        reason = f"the SHA-256 of {name} is {found['sha256']}, expected {expected['sha256']}"
    else:
        return
    text = f"the checkpoint {str(checkpoint)!r} is damaged: {reason}"
    raise DataError(text, path=str(path), file=name)
