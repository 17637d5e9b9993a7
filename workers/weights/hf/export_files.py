"""Directories of safetensors, written by several ranks, each its own files, and the files beside the weights.

A directory becomes visible when it is completely written.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from mcontroller.errors import DataError, before_changes
from mcontroller.files import (
    check_new_directory,
    discard_directory,
    free_space,
    partial_path,
    release_lock,
    start_directory,
)
from parallel_state.agreement import raise_on_every_rank
from workers.weights.hf.files import INDEX, SINGLE, WEIGHTS, matches

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
# Files that describe the weights of a directory.
_OF_WEIGHTS = ("*.index.json", "config.json", "README*", ".*", "*quant*.json")


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
            copied = [*(entry for entry in copied if not matches(entry, _TOKENIZER)), *tokenizer.iterdir()]
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
        (directory / INDEX).write_text(json.dumps(index, indent=2))
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def _is_companion(entry: Path) -> bool:
    """Whether an export has a file of its model's directory too; other folders may have weights of another format."""
    return (entry.is_file() or matches(entry, _TOKENIZER)) and not matches(entry, (*WEIGHTS, *_OF_WEIGHTS))


def _names(count: int) -> Iterator[str]:
    if count == 1:
        yield SINGLE
        return
    for number in range(1, count + 1):
        yield f"model-{number:05}-of-{count:05}.safetensors"


def _lock(target: Path) -> Path:
    return target.with_name(f".{target.name}.lock")
