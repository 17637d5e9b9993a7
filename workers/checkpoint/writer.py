"""Writing Megatron's distributed format: every rank its files, with their checksums, and one error if one rank fails.

The files are the same as of ``megatron.core.dist_checkpointing.save`` (strategy ``torch_dist``): shards, ``.metadata``,
``common.pt`` and ``metadata.json``. Megatron's own writer raises an error of the coordinator on its rank only, so that
the others wait for it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import json
import os
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint import filesystem
from torch.utils.serialization import config as serialization

from mcontroller.errors import DataError
from mcontroller.files import free_space
from parallel_state.agreement import all_gather_values, raise_on_every_rank
from parallel_state.releases import async_save_arguments
from workers.checkpoint import write_from_memory
from workers.checkpoint.checksums import FileEntry, NewFile, file_entry

_COMMON, _METADATA, _CONFIG = "common.pt", ".metadata", "metadata.json"


class PlannedWrite:
    """The files that the ranks of a checkpoint write: at once, or in a process of each rank while it goes on.

    Args:
        writer: Megatron's writer, with the tensors and objects of this rank.
        metadata: of the whole checkpoint, on rank 0.
        config: content of ``metadata.json``.
        then: called on every rank with the files and their checksums, by name, when all are on the disk.
    """

    def __init__(
        self,
        writer: Any,
        metadata: Any,
        config: CheckpointingConfig,
        then: Callable[[dict[str, FileEntry]], None],
    ) -> None:
        self._writer, self._metadata, self._config, self._then = writer, metadata, config, then
        self._directory = Path(writer.checkpoint_dir)
        self._nbytes = sum(tensor.nbytes for *_, (_, tensors) in writer.write_buckets or () for _, tensor in tensors)
        self._results: list[Any] = []
        self._files: dict[str, FileEntry] = {}
        self._error: str | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def write(self) -> None:
        """Write the files of this rank now. An error is raised by ``finish``."""
        buckets = self._writer.write_buckets
        if not buckets:
            return
        try:
            with without_crc32(), ThreadPoolExecutor(len(buckets)) as threads:
                written = list(threads.map(functools.partial(_write_file, self._writer.transforms), buckets))
        except OSError as error:
            self._error = str(error)
            return
        self._results = [result for of_file, _ in written for result in of_file]
        self._files = {name: entry for (_, name, _), (_, entry) in zip(buckets, written, strict=True)}

    def start(self) -> None:
        """Copy the files of this rank to memory, and start the process that writes them from there."""
        if not self._writer.write_buckets:
            return
        try:
            with contextlib.ExitStack() as opened:
                self._process = self._start_process(
                    [self._copied(bucket, opened) for bucket in self._writer.write_buckets]
                )
        except OSError as error:
            self._error = str(error)

    def _copied(self, bucket: Any, opened: contextlib.ExitStack) -> list[Any]:
        """Return the descriptor of a file in memory with the content of a bucket, and the path to write it to."""
        path, name, (objects, tensors) = bucket
        memory = opened.enter_context(contextlib.closing(NewFile(os.memfd_create(name))))
        with _naming_the_cause(memory):
            self._results += _write_items(self._writer.transforms, memory, name, (*objects, *tensors))
            memory.flush()
        tensors.clear()  # views were copied before
        return [memory.fileno(), path]

    @staticmethod
    def _start_process(files: list[list[Any]]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", write_from_memory.__file__]
        descriptors = [descriptor for descriptor, _ in files]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=descriptors)
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # it has ended: ``finish`` reports that
                pipe.write(json.dumps(files).encode())
        return process

    def is_written(self) -> bool:
        """Return whether the process of this rank has ended."""
        return self._process is None or self._process.poll() is not None

    def finish(self) -> None:
        """Wait for the files of all ranks, then write the files that describe them, and call ``then`` (a collective).

        Raises:
            DataError: on every rank, if one of them could not write.
        """
        self._wait()
        own = raise_on_every_rank(self._outcome)
        of_ranks = all_gather_values(own)

        def describe() -> dict[str, FileEntry]:
            with _failing_as_data_error(self._directory):
                self._writer.finish(self._metadata, [results for results, _ in of_ranks])
                save_config(self._config, str(self._directory))
                for name in (_METADATA, _CONFIG):
                    _flush(self._directory / name)
                return {name: file_entry(self._directory / name) for name in (_METADATA, _CONFIG, _COMMON)}

        described = raise_on_every_rank(lambda: describe() if dist.get_rank() == 0 else {})
        self._then({name: entry for _, files in of_ranks for name, entry in files.items()} | described)

    def _wait(self) -> None:
        """Wait for the process, and take its checksums or its error."""
        if self._process is None or self._process.stdout is None:
            return
        with self._process.stdout as pipe:
            output = pipe.read()
        status = self._process.wait()
        answer = json.loads(output) if output and status == 0 else f"the process that writes its files ended: {status}"
        if isinstance(answer, str):
            self._error = answer
            return
        names = [name for _, name, _ in self._writer.write_buckets]
        self._files = {
            name: {"size": size, "sha256": digest} for name, (size, digest) in zip(names, answer, strict=True)
        }

    def _outcome(self) -> tuple[list[Any], dict[str, FileEntry]]:
        if self._error is not None:
            raise _unwritten(self._directory, f"its part of {self._nbytes:,} bytes: {self._error}")
        return self._results, self._files


def prepare_write(
    state: dict[str, Any],
    directory: Path,
    replicas: dist.ProcessGroup,
    then: Callable[[dict[str, FileEntry]], None],
) -> PlannedWrite:
    """Plan the write of ``state`` into an empty directory (a collective).

    Args:
        state: Megatron's sharded tensors and objects, and other values, which rank 0 writes.
        directory: exists on the file system of all ranks.
        replicas: the ranks that have the same tensors; the writing is divided over them.
        then: called on every rank with the files and their checksums, by name, when all are on the disk.

    Returns:
        The write of this rank's part, which does not raise before it is finished.

    Raises:
        DataError: on every rank, if rank 0 cannot write.
    """
    sharded, common = save_preprocess(state)

    def write_common() -> None:
        with _failing_as_data_error(directory):
            file = NewFile(directory / _COMMON)
            sink: Any = file  # torch declares more of a file than it uses
            with contextlib.closing(file), _naming_the_cause(file):
                torch.save(common, sink)
                file.finish()

    raise_on_every_rank(lambda: write_common() if dist.get_rank() == 0 else None)
    strategy = _Strategy("torch_dist", 1)
    if dist.get_world_size(replicas) > 1:
        FullyParallelSaveStrategyWrapper(strategy, replicas).apply_saving_parallelization(sharded)
    with _without_results_queue():
        writer, metadata = strategy.async_save(sharded, directory, **async_save_arguments())
    return PlannedWrite(writer, metadata, CheckpointingConfig(strategy.backend, strategy.version), then)


class _Strategy(TorchDistSaveShardedStrategy):
    """Megatron's plan of who writes what, without its writing."""

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any, *_: Any) -> Any:
        _, preload, _ = writer.get_save_function_and_args()
        if preload is not None:
            writer.write_buckets = preload()
        return writer, planned[1]


@contextlib.contextmanager
def _without_results_queue() -> Iterator[None]:
    """Keep Megatron's writer from starting a process for a queue of results, which is not used."""
    module: Any = filesystem_async
    before = getattr(module, "_results_queue", None)
    module._results_queue = before or queue.SimpleQueue()
    try:
        yield
    finally:
        module._results_queue = before


def without_crc32() -> AbstractContextManager[None]:
    """Leave out the CRC-32 of every tensor: it takes as long as the copy, and the manifest has a SHA-256."""
    settings: Any = serialization  # torch adds ``patch`` when it is imported
    return settings.patch({"save.compute_crc32": False})


def _write_file(transforms: Any, bucket: Any) -> tuple[list[Any], FileEntry]:
    path, name, (objects, tensors) = bucket
    file = NewFile(path)
    with contextlib.closing(file), _naming_the_cause(file):
        return _write_items(transforms, file, name, (*objects, *tensors)), file.finish()


def _write_items(transforms: Any, file: Any, name: str, items: Sequence[Any]) -> list[Any]:
    write: Any = filesystem._write_item
    torch_save = {}
    if "serialization_format" in inspect.signature(write).parameters:
        torch_save = {"serialization_format": filesystem.SerializationFormat.TORCH_SAVE}
    return [write(transforms, file, data, item, name, **torch_save) for item, data in items]


@contextlib.contextmanager
def _naming_the_cause(file: NewFile) -> Iterator[None]:
    """Raise the file system's error in place of the error that torch raises because of it."""
    try:
        yield
    except RuntimeError as error:
        raise (file.error or error) from error


@contextlib.contextmanager
def _failing_as_data_error(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unwritten(directory, str(error)) from error


def _unwritten(directory: Path, cause: str) -> DataError:
    rank = dist.get_rank()
    text = f"rank {rank} cannot write the checkpoint {str(directory)!r}, {cause}; {free_space(directory)}"
    return DataError(text, path=str(directory), rank=rank)


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


class BackgroundSaves:
    """At most one save in flight. Every method is a collective.

    A checkpoint contains the state at the time when ``begin`` returned. It is finished by ``finish``, which must be
    called before the next ``begin``, by ``finish_if_written``, or when the interpreter exits.
    """

    def __init__(self) -> None:
        self._write: PlannedWrite | None = None
        self._finishing: Callable[[], AbstractContextManager[None]] | None = None
        self._used = False

    def begin(self, write: PlannedWrite, finishing: Callable[[], AbstractContextManager[None]]) -> None:
        """Start the write of a checkpoint.

        Args:
            write: its finish makes the checkpoint visible.
            finishing: makes the context in which the write is finished.
        """
        if not self._used:
            self._used = True
            atexit.register(self.finish)
        write.start()
        self._write, self._finishing = write, finishing

    def finish_if_written(self) -> None:
        """Finish the save in flight, if there is one and every rank has written its part.

        Raises:
            DataError: on every rank, if one of them could not write its part; the directory does not appear.
        """
        if self._write is None:
            return
        writing = torch.tensor([not self._write.is_written()], dtype=torch.int32, device=torch.cuda.current_device())
        dist.all_reduce(writing)
        if not writing.item():
            self.finish()

    def finish(self) -> None:
        """Wait for the save in flight, if there is one.

        Raises:
            DataError: on every rank, if one of them could not write its part; the directory does not appear.
        """
        write, finishing = self._write, self._finishing
        self._write = self._finishing = None
        if write is not None and finishing is not None:
            with finishing():
                write.finish()
