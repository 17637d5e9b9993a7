"""Writing Megatron's distributed format: every rank its files, with their checksums, and one error if one rank fails.

The files are those of ``megatron.core.dist_checkpointing.save`` (strategy ``torch_dist``): shards, ``.metadata``,
``common.pt`` and ``metadata.json``. Megatron's own writer raises an error of the coordinator on its rank only, so that
the others wait for it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint import filesystem

from mcontroller.errors import DataError
from parallel_state.agreement import all_gather_values, raise_on_every_rank
from parallel_state.releases import async_save_arguments
from workers.checkpoint.checksums import FileEntry, HashedFile, file_entry

__all__ = ["prepare_write"]

_COMMON, _METADATA, _CONFIG = "common.pt", ".metadata", "metadata.json"


def prepare_write(
    state: dict[str, Any],
    directory: Path,
    replicas: dist.ProcessGroup,
    then: Callable[[dict[str, FileEntry]], None],
) -> AsyncRequest:
    """Plan the write of ``state`` into an empty directory (a collective).

    Args:
        state: Megatron's sharded tensors and objects, and other values, which rank 0 writes.
        directory: exists on the file system of all ranks.
        replicas: the ranks that have the same tensors; the writing is divided over them.
        then: called on every rank with the files and their checksums, by name, when all are on the disk.

    Returns:
        The request. Its execution does not raise before its finalization, which is a collective; that raises DataError
        on every rank if one of them could not write.

    Raises:
        DataError: on every rank, if rank 0 cannot write.
    """
    sharded, common = save_preprocess(state)

    def write_common() -> None:
        with _failing_as_data_error(directory):
            file = HashedFile(directory / _COMMON)
            sink: Any = file  # torch declares more of a file than it uses
            with contextlib.closing(file), _naming_the_cause(file):
                torch.save(common, sink)
                file.finish()

    raise_on_every_rank(lambda: write_common() if dist.get_rank() == 0 else None)
    strategy = _Strategy("torch_dist", 1)
    if dist.get_world_size(replicas) > 1:
        FullyParallelSaveStrategyWrapper(strategy, replicas).apply_saving_parallelization(sharded)
    request: AsyncRequest = strategy.async_save(sharded, directory, **async_save_arguments())
    request.finalize_fns.append(lambda: then(strategy.files))
    return request


class _Strategy(TorchDistSaveShardedStrategy):
    """Megatron's plan of who writes what, with the writer of this module.

    Attributes:
        files: the files of all ranks, when they are written.
    """

    files: dict[str, FileEntry]

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any, *_: Any) -> AsyncRequest:
        _, preload, arguments = writer.get_save_function_and_args()
        if writer.results_queue is not None:
            _empty(
                writer.results_queue
            )  # Megatron has one for all saves of a process: of a failed one, it has the rest
        write = functools.partial(_write_files, writer.transforms) if arguments else None
        finish = functools.partial(self._finish, writer, planned[1])
        return AsyncRequest(write, arguments, [finish], preload_fn=preload)

    def _finish(self, writer: Any, metadata: Any) -> None:
        """Agree that all ranks have written their files, then write those that describe them (a collective)."""
        directory = Path(writer.checkpoint_dir)
        results, files = raise_on_every_rank(lambda: _outcome(writer, directory))
        of_ranks = all_gather_values((results, files))

        def describe() -> dict[str, FileEntry]:
            with _failing_as_data_error(directory):
                writer.finish(metadata, [results for results, _ in of_ranks])
                save_config(CheckpointingConfig(self.backend, self.version), str(directory))
                for name in (_METADATA, _CONFIG):
                    _flush(directory / name)
                return {name: file_entry(directory / name) for name in (_METADATA, _CONFIG, _COMMON)}

        described = raise_on_every_rank(lambda: describe() if dist.get_rank() == 0 else {})
        self.files = {name: entry for _, own in of_ranks for name, entry in own.items()} | described


def _outcome(writer: Any, directory: Path) -> tuple[list[Any], dict[str, FileEntry]]:
    if not writer.write_buckets:
        return [], {}
    try:
        written = writer.results_queue.get(timeout=10)
    except queue.Empty:
        written = "the process that wrote its files ended without a result"
    if isinstance(written, str):
        text = f"rank {dist.get_rank()} cannot write the checkpoint {str(directory)!r}: {written}"
        raise DataError(text, path=str(directory), rank=dist.get_rank())
    return written


def _write_files(transforms: Any, _: int, buckets: Sequence[Any], results: Any) -> None:
    """Write the files of this rank, and put their descriptions and checksums, or an error text, into ``results``."""
    try:
        with ThreadPoolExecutor(len(buckets)) as threads:
            written = list(threads.map(functools.partial(_write_file, transforms), buckets))
    except OSError as error:
        results.put(str(error))
        return
    entries = {name: entry for (_, name, _), (_, entry) in zip(buckets, written, strict=True)}
    results.put(([result for of_file, _ in written for result in of_file], entries))


def _write_file(transforms: Any, bucket: Any) -> tuple[list[Any], FileEntry]:
    path, name, (objects, tensors) = bucket
    file = HashedFile(path)
    write: Any = filesystem._write_item
    torch_save = {}
    if "serialization_format" in inspect.signature(write).parameters:
        torch_save = {"serialization_format": filesystem.SerializationFormat.TORCH_SAVE}
    with contextlib.closing(file), _naming_the_cause(file):
        results = [write(transforms, file, data, item, name, **torch_save) for item, data in (*objects, *tensors)]
        return results, file.finish()


@contextlib.contextmanager
def _naming_the_cause(file: HashedFile) -> Iterator[None]:
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
        text = f"rank {dist.get_rank()} cannot write the checkpoint {str(directory)!r}: {error}"
        raise DataError(text, path=str(directory), rank=dist.get_rank()) from error


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _empty(results: Any) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            results.get_nowait()
