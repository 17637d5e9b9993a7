"""Directories of safetensors, read in slices."""

from __future__ import annotations

import fnmatch
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from mcontroller.errors import DataError
from mcontroller.files import is_lfs_pointer

if TYPE_CHECKING:
    import safetensors  # imported on use: a model without a Hugging Face checkpoint needs none

SINGLE = "model.safetensors"
"""The only file of weights, if there is one."""
INDEX = "model.safetensors.index.json"
"""The file that says which of several has a tensor."""
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.npz")
"""Files of weights, in any format."""
_DTYPES = ("F64", "F32", "F16", "BF16")
# Weights in FP8 have one number for each block, by which its values are multiplied.
_QUANTIZED, _SCALE = "F8_E4M3", "_scale_inv"


class WeightFiles:
    """The tensors of a directory by name. Reading a slice reads no other part of the files.

    Weights in FP8 with a scale for each block, as DeepSeek-V3 has them on disk, are read as float32.

    Args:
        directory: one with ``model.safetensors``, or with ``model.safetensors.index.json``.

    Raises:
        DataError: there are no safetensors, a file named in the index is missing, or one is damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: dict[str, safetensors.safe_open] = {}
        if (directory / SINGLE).is_file():  # transformers, which may leave an old index there, reads it first too
            self._file_of = dict.fromkeys(self._opened(SINGLE).keys(), SINGLE)
        elif (directory / INDEX).is_file():
            self._file_of = _read_index(directory)
        else:
            raise DataError(
                f"there are no weights at {str(directory)!r}: expected {SINGLE} or {INDEX}; convert other "
                "formats first (model.save_pretrained of transformers)",
                path=str(directory),
            )
        absent = sorted(name for name in set(self._file_of.values()) if not (directory / name).is_file())
        if absent:
            raise DataError(f"{INDEX} in {str(directory)!r} names missing files: {absent}", missing=absent)

    def check(self) -> None:
        """Open every file, which reads its header and compares its length.

        Raises:
            DataError: a file is damaged, or lacks a tensor that the index says it has.
        """
        for path in sorted(set(self._file_of.values())):
            missing = sorted(
                {name for name, file in self._file_of.items() if file == path} - {*self._opened(path).keys()}
            )
            if missing:
                self._raise_without(path, missing[0])

    @property
    def names(self) -> set[str]:
        """The names of all tensors but the scales of others."""
        return self._file_of.keys() - {name + _SCALE for name in self._file_of}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor.

        Raises:
            DataError: the file does not have it, or its values are no floating-point numbers of 16 bits or more.
        """
        if name not in self._opened(self._file_of[name]).keys():  # noqa: SIM118 - not a mapping
            self._raise_without(self._file_of[name], name)
        stored = self._file(name).get_slice(name)
        shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
        if name + _SCALE in self._file_of:
            self._check_scales(name, shape, dtype)
        elif dtype not in _DTYPES:
            text = f"{name} in {str(self.directory)!r} is of dtype {dtype}, expected {', '.join(_DTYPES)}"
            raise DataError(text, path=str(self.directory), tensor=name)
        return shape

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> torch.Tensor:
        """Return ``[start:stop]`` of a tensor along ``dim`` (0 or 1), or all of it if ``dim`` is None."""
        values = self._slice(name, dim, start, stop)
        if name + _SCALE not in self._file_of:
            return values
        offsets = [start if axis == dim else 0 for axis in (0, 1)]
        of_block = [
            (torch.arange(size) + offset) // block
            for size, offset, block in zip(values.shape, offsets, self.block, strict=True)
        ]
        scales = self._file(name + _SCALE).get_tensor(name + _SCALE)
        return values.float().mul_(scales.float()[of_block[0]][:, of_block[1]])

    def _raise_without(self, path: str, name: str) -> NoReturn:
        text = f"{path} in {str(self.directory)!r} has no tensor {name}, which {INDEX} says it has"
        raise DataError(text, path=str(self.directory), tensor=name)

    def _slice(self, name: str, dim: int | None, start: int, stop: int) -> torch.Tensor:
        if dim is None:
            return self._file(name).get_tensor(name)
        part = self._file(name).get_slice(name)
        return part[start:stop] if dim == 0 else part[:, start:stop]

    @functools.cached_property
    def block(self) -> tuple[int, int]:
        """Rows and columns of the blocks that have a scale each, from ``config.json``."""
        config = json.loads((self.directory / "config.json").read_text(encoding="utf-8"))
        rows, columns = config["quantization_config"]["weight_block_size"]
        return int(rows), int(columns)

    def _check_scales(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        """Check that every block of a weight in FP8 has a scale."""
        stored = tuple(self._file(name + _SCALE).get_slice(name + _SCALE).get_shape())
        try:
            expected = tuple(-(-size // block) for size, block in zip(shape, self.block, strict=True))
        except (OSError, KeyError, TypeError, ValueError) as error:
            text = f"{name} in {str(self.directory)!r} has {name + _SCALE}, but config.json has no weight_block_size"
            raise DataError(text, path=str(self.directory), tensor=name) from error
        if dtype != _QUANTIZED or stored != expected:
            raise DataError(
                f"{name} in {str(self.directory)!r} is {dtype} {list(shape)} with scales {list(stored)}; expected "
                f"{_QUANTIZED} with scales {list(expected)} for blocks of {list(self.block)}",
                path=str(self.directory),
                tensor=name,
            )

    def first_different_row(self, one: str, other: str) -> int | None:
        """Compare two tensors of one shape in 16 rows; return the first one that differs, or None."""
        rows, *_ = self.shape(one)
        for row in range(0, rows, max(rows // 16, 1)):
            if not self.read(one, 0, row, row + 1).equal(self.read(other, 0, row, row + 1)):
                return row
        return None

    def _file(self, name: str) -> safetensors.safe_open:
        return self._opened(self._file_of[name])

    def _opened(self, path: str) -> safetensors.safe_open:
        if path not in self._open:
            self._open[path] = open_safetensors(self.directory / path)
        return self._open[path]


def open_safetensors(file: Path) -> safetensors.safe_open:
    """Open a file, which reads its header and compares its length.

    Raises:
        DataError: it cannot be read, or is damaged.
    """
    import safetensors

    try:
        return safetensors.safe_open(file, framework="pt")
    except (OSError, safetensors.SafetensorError) as error:
        pointer = "it is a pointer of Git LFS, not the file: run `git lfs pull`"
        text = f"{file.name} in {str(file.parent)!r} cannot be read: {pointer if is_lfs_pointer(file) else error}"
        raise DataError(text, path=file.name) from error


def weight_paths(directory: Path) -> list[Path]:
    """Return the files that ``WeightFiles`` reads; of a directory that it cannot read, all safetensors.

    Raises:
        DataError: the index is damaged.
    """
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if (directory / INDEX).is_file():
        return sorted({directory / name for name in _read_index(directory).values()})
    return sorted(directory.glob("*.safetensors"))


def _read_index(directory: Path) -> dict[str, str]:
    """Return the file of each tensor: files of the directory itself."""
    try:
        index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
        files = index.get("weight_map") if isinstance(index, dict) else None
        reason = f"weight_map is {files!r:.100}, expected an object of file names"
    except (ValueError, RecursionError) as error:
        files, reason = None, repr(error)
    if isinstance(files, dict):
        outside = [file for file in files.values() if not isinstance(file, str) or Path(file).name != file or not file]
        if not outside:
            return files
        reason = f"it names {outside[0]!r:.100}, expected files of the directory"
    raise DataError(f"{INDEX} in {str(directory)!r} is damaged: {reason}", path=str(directory))


def has_weights(directory: Path) -> bool:
    """Return whether a directory has files of weights in any format, whole or not."""
    return any(matches(entry, WEIGHTS) for entry in directory.iterdir())


def matches(entry: Path, patterns: Sequence[str]) -> bool:
    """Return whether the name of a file matches one of the patterns."""
    return any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in patterns)
