"""Files of the batches in flight: responses that were generated, and not yet trained on, when a run was saved."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mcontroller.data.protocol import DataProto
from mcontroller.errors import DataError
from mcontroller.files import sync_directory

__all__ = ["BatchInFlight", "SavedBatch", "read_batches", "write_batches"]

_CHUNK = 1 << 24


@dataclass(frozen=True)
class BatchInFlight:
    """A batch whose responses were generated ahead.

    Attributes:
        number: of its problems in the sequence of the data set.
        responses: the responses, with all columns.
    """

    number: int
    responses: DataProto


@dataclass(frozen=True)
class SavedBatch:
    """The record of a saved batch.

    Attributes:
        number: of its problems in the sequence of the data set.
        crc32: of its file.
    """

    number: int
    crc32: int


def write_batches(directory: Path, batches: Sequence[BatchInFlight]) -> tuple[SavedBatch, ...]:
    """Write a file for each batch into a new directory, and return what is recorded of them.

    Raises:
        DataError: a value of a batch cannot be stored in a file.
    """
    directory.mkdir(parents=True)
    saved = []
    for batch in batches:
        path = _path(directory, batch.number)
        batch.responses.save_to_disk(path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        saved.append(SavedBatch(batch.number, _checksum(path)))
    sync_directory(directory)
    return tuple(saved)


def read_batches(directory: Path, saved: Sequence[SavedBatch]) -> tuple[BatchInFlight, ...]:
    """Return the batches of a directory.

    Raises:
        DataError: a file is missing or damaged.
    """
    found = []
    for each in saved:
        path = _path(directory, each.number)
        if not path.is_file():
            raise DataError(f"{path} does not exist", path=str(path))
        checksum = _checksum(path)
        if checksum != each.crc32:
            raise DataError(f"{path} has the CRC-32 {checksum}; expected {each.crc32}: it is damaged", path=str(path))
        found.append(BatchInFlight(each.number, DataProto.load_from_disk(path)))
    return tuple(found)


def _path(directory: Path, number: int) -> Path:
    return directory / f"batch_{number}.safetensors"


def _checksum(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value
