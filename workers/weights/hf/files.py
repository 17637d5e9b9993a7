"""Directories of safetensors: read in slices, and written by several ranks, each its own files.

A directory becomes visible when it is completely written.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist

from mcontroller.errors import DataError, before_changes
from mcontroller.files import (
    check_new_directory,
    discard_directory,
    free_space,
    is_lfs_pointer,
    partial_path,
    release_lock,
    start_directory,
)
from parallel_state.agreement import raise_on_every_rank

if TYPE_CHECKING:
    import safetensors  # imported on use: a model without a Hugging Face checkpoint needs none

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("F64", "F32", "F16", "BF16")
# Weights in FP8 have one number for each block, by which its values are multiplied.
_QUANTIZED, _SCALE = "F8_E4M3", "_scale_inv"
_TOKENIZER = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates",
    "*.model",
    "*.tiktoken",
)
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.npz")
# Files that describe the weights of a directory.
_OF_WEIGHTS = ("*.index.json", "config.json", "README*", ".*", "*quant*.json")


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
        if (directory / _SINGLE).is_file():  # transformers, which may leave an old index there, reads it first too
            self._file_of = dict.fromkeys(self._opened(_SINGLE).keys(), _SINGLE)
        elif (directory / _INDEX).is_file():
            self._file_of = _read_index(directory)
        else:
            raise DataError(
                f"there are no weights at {str(directory)!r}: expected {_SINGLE} or {_INDEX}; convert other "
                "formats first (model.save_pretrained of transformers)",
                path=str(directory),
            )
        absent = sorted(name for name in set(self._file_of.values()) if not (directory / name).is_file())
        if absent:
            raise DataError(f"{_INDEX} in {str(directory)!r} names missing files: {absent}", missing=absent)

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
        text = f"{path} in {str(self.directory)!r} has no tensor {name}, which {_INDEX} says it has"
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
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    if (directory / _INDEX).is_file():
        return sorted({directory / name for name in _read_index(directory).values()})
    return sorted(directory.glob("*.safetensors"))


def _read_index(directory: Path) -> dict[str, str]:
    """Return the file of each tensor: files of the directory itself."""
    try:
        index = json.loads((directory / _INDEX).read_text(encoding="utf-8"))
        files = index.get("weight_map") if isinstance(index, dict) else None
        reason = f"weight_map is {files!r:.100}, expected an object of file names"
    except (ValueError, RecursionError) as error:
        files, reason = None, repr(error)
    if isinstance(files, dict):
        outside = [file for file in files.values() if not isinstance(file, str) or Path(file).name != file or not file]
        if not outside:
            return files
        reason = f"it names {outside[0]!r:.100}, expected files of the directory"
    raise DataError(f"{_INDEX} in {str(directory)!r} is damaged: {reason}", path=str(directory))


class WeightWriter:
    """Collect one rank's tensors, and write a file for every ``max_bytes`` of them.

    Args:
        directory: of the export, see ``exporting``.
        rank: the rank that writes; part of temporary file names.
        max_bytes: most bytes of a file with several tensors.
    """

    def __init__(self, directory: Path, rank: int, max_bytes: int) -> None:
        self._directory, self._rank, self._max_bytes = directory, rank, max_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._written: dict[str, dict[str, int]] = {}
        self._failure: DataError | None = None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a copy of a tensor; it may stay in host memory until ``close``, which raises if it cannot be written."""
        if self._failure is not None:
            return
        if self._pending and sum(held.nbytes for held in self._pending.values()) + tensor.nbytes > self._max_bytes:
            self._flush()
        self._pending[name] = tensor.detach().cpu().contiguous().clone()

    def close(self) -> dict[str, dict[str, int]]:
        """Write the remaining tensors, and return the bytes of each tensor of this rank, by file and name.

        Raises:
            DataError: a file could not be written.
        """
        if self._pending:
            self._flush()
        if self._failure is not None:
            raise self._failure
        return self._written

    def _flush(self) -> None:
        name = f"rank-{self._rank:05}-{len(self._written):05}.safetensors"
        try:
            save_tensors(self._pending, self._directory / name)
        except DataError as error:  # later: tensors are put together by all ranks, which go on
            self._failure = error
        self._written[name] = {tensor: values.nbytes for tensor, values in self._pending.items()}
        self._pending = {}


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, **metadata: str) -> None:
    """Write tensors in the format of safetensors, to a file that others may read as the umask says.

    Args:
        tensors: by name.
        path: the file.
        metadata: texts for the header of the file.

    Raises:
        DataError: the file cannot be written.
    """
    from safetensors.torch import save_file

    dense = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with writing_to(path):
        path.touch()
        mode = path.stat().st_mode
        save_file(dense, path, metadata={"format": "pt", **metadata})  # replaces it with a file of its owner alone
        path.chmod(mode)


@contextlib.contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Raise DataError if a file cannot be written, with the free bytes of the disk of ``path``."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot write {str(path)!r}: {error}; {free_space(path)}", path=str(path)) from error


@contextlib.contextmanager
def exporting(target: Path) -> Iterator[Path]:
    """Write the files of an export in the block, in the directory that is yielded (a collective).

    When the block has ended on all ranks, the directory becomes ``target``. If it raises, what was written is deleted,
    and the error is one before changes: the group goes on.

    Raises:
        DataError: on every rank: ``target`` exists and is not an empty directory, another process exports to it, or it
            cannot be written.
    """
    with before_changes():
        on_first_rank(lambda: start_export(target))
        try:
            yield partial_path(target)
            on_first_rank(lambda: _publish(target))
        except BaseException:
            if dist.get_rank() == 0:
                discard_directory(target, _lock(target))
            raise


def on_first_rank(write: Callable[[], None]) -> None:
    """Call a function on rank 0, and raise its error on all ranks (a collective)."""
    raise_on_every_rank(lambda: write() if dist.get_rank() == 0 else None)


def start_export(target: Path) -> None:
    """Create an empty directory at ``partial_path(target)``, and lock ``target`` until the export ends.

    Raises:
        DataError: ``target`` exists and is not an empty directory, another process exports to it, or the directory
            cannot be created.
    """
    check_new_directory(target)
    start_directory(target, _lock(target), f"the export to {target}")


def _publish(target: Path) -> None:
    with writing_to(target):
        if target.exists():
            target.rmdir()
        partial_path(target).rename(target)
    release_lock(_lock(target))


def complete_export(
    directory: Path,
    config: Mapping[str, object],
    files: Mapping[str, Mapping[str, int]],
    companions: Path | None,
    tokenizer: Path | None = None,
) -> None:
    """Rename the files of weights, and write the index, ``config.json`` and the files beside them.

    Args:
        directory: of the export, see ``exporting``.
        config: content of ``config.json``.
        files: the files of all ranks, in the order in which they are numbered, as ``WeightWriter.close`` returns them.
        companions: a directory whose files are copied, such as its tokenizer, code and generation configuration, except
            its weights and what describes them; or None.
        tokenizer: a directory with the files of another tokenizer, which are copied instead; None for that one.

    Raises:
        DataError: a file cannot be read or written.
    """
    with writing_to(directory):
        _describe_weights(directory, config, files)
        copied = [] if companions is None else [entry for entry in companions.iterdir() if _is_companion(entry)]
        if tokenizer is not None:
            copied = [*(entry for entry in copied if not _matches(entry, _TOKENIZER)), *tokenizer.iterdir()]
        for entry in copied:
            copy = shutil.copytree if entry.is_dir() else shutil.copy
            copy(entry, directory / entry.name)


def _describe_weights(directory: Path, config: Mapping[str, object], files: Mapping[str, Mapping[str, int]]) -> None:
    weight_map: dict[str, str] = {}
    for (file, tensors), name in zip(files.items(), _names(len(files)), strict=True):
        (directory / file).rename(directory / name)
        weight_map |= dict.fromkeys(tensors, name)
    if len(files) > 1:
        total = sum(nbytes for tensors in files.values() for nbytes in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / _INDEX).write_text(json.dumps(index, indent=2))
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def has_weights(directory: Path) -> bool:
    """Return whether a directory has files of weights in any format, whole or not."""
    return any(_matches(entry, _WEIGHTS) for entry in directory.iterdir())


def _is_companion(entry: Path) -> bool:
    """Whether an export has a file of its model's directory too; other folders may have weights of another format."""
    return (entry.is_file() or _matches(entry, _TOKENIZER)) and not _matches(entry, (*_WEIGHTS, *_OF_WEIGHTS))


def _matches(entry: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in patterns)


def _names(count: int) -> Iterator[str]:
    if count == 1:
        yield _SINGLE
        return
    for number in range(1, count + 1):
        yield f"model-{number:05}-of-{count:05}.safetensors"


def _lock(target: Path) -> Path:
    return target.with_name(f".{target.name}.lock")
