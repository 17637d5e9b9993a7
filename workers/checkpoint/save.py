"""Save a checkpoint: copy the state to memory, write it to a staging directory, and rename that when it is complete.

``Saver.start`` copies: torch.distributed.checkpoint plans which rank writes which tensors, and writes them to files in
host memory. From then on the state may change. A thread of each rank writes its files to the disk, flushes them and
computes their checksums. ``Saver.finish`` waits for the threads of all ranks, writes the manifest with all checksums,
and makes the directory visible by renaming it. A save that fails or is killed before that leaves the earlier
checkpoints as they are. What is on the disk::

    latest                              the name of the newest checkpoint
    latest_checkpointed_iteration.txt   its step, for Megatron-LM, which finds it as iter_0000100
    .save.lock                          while a process saves here
    .global_step_200.partial/           a save that is not complete
    iter_0000100 -> global_step_100
    global_step_100/
        manifest.json                   see ``Manifest``; written last
        __0_0.distcp, __1_0.distcp ...  the shards of each rank; these and what follows are of ``torch_dist``,
        .metadata                       the format of megatron.core.dist_checkpointing
        common.pt, metadata.json
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import io
import json
import os
from collections.abc import Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, is_main_replica
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from torch.distributed import checkpoint
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.utils.serialization import config as serialization

from mcontroller.errors import ConfigError, DataError, before_changes
from mcontroller.files import (
    delete_directory,
    delete_obsolete,
    discard_directory,
    free_space,
    partial_path,
    release_lock,
    replace_text,
    start_directory,
    sync_directory,
)
from parallel_state.agreement import all_gather_values, raise_on_every_rank
from workers.checkpoint.manifest import (
    FORMAT,
    LATEST,
    STEP,
    Buckets,
    FileEntry,
    Manifest,
    checkpoint_path,
    write_manifest,
)
from workers.checkpoint.optimizer_state import buckets_to_save
from workers.checkpoint.state import computed_function, layout_of, sharded_state, vocab_size_of
from workers.config.model import ModelConfig
from workers.train.state import TrainingState

_CHUNK = 1 << 22
_LOCK = ".save.lock"
_LINK = "iter_{:07d}"
_LATEST_OF_MEGATRON_LM = "latest_checkpointed_iteration.txt"


class Saver:
    """Saves the checkpoints of a worker, at most one at a time. Every method is a collective.

    A checkpoint has the state at the time when ``start`` returned. It becomes visible by ``finish``, by
    ``finish_if_written``, or when the interpreter exits.
    """

    def __init__(self) -> None:
        self._save: _Save | None = None
        self._finishes_at_exit = False
        self._strategies: dict[Hashable, FullyParallelSaveStrategyWrapper] = {}

    def start(
        self,
        training: TrainingState,
        model: ModelConfig,
        path: str | os.PathLike[str],
        step: int,
        keep: int | None,
        reshardable: bool,
    ) -> Path:
        """Begin to write ``<path>/global_step_<step>``, and return this path.

        Args:
            training: the objects to save. The optimizer is saved only if its schedule has made a step.
            model: the configuration of its models.
            path: a directory on a file system that all nodes share.
            step: the number in the directory's name.
            keep: how many checkpoints stay under ``path``: this one and the newest steps of the others; None keeps all.
            reshardable: save the state of a distributed optimizer by weights, which any layout loads. It is gathered
                over the data-parallel ranks, each of which holds all of it in host memory for that. False: in its
                buckets, without communication; it loads with the same axes but dp and cp.

        Raises:
            ConfigError: ``keep`` is less than 1.
            DataError: on every rank, if the earlier save has failed, or the directory cannot be created.
        """
        if keep is not None and keep < 1:
            text = f"save_checkpoint: max_to_keep is {keep}; it must be at least 1, or None to keep all"
            with before_changes():
                raise ConfigError(text, key="max_to_keep", value=keep)
        self.finish()
        target = checkpoint_path(Path(path), step)
        with before_changes():
            raise_on_every_rank(lambda: create_partial(target) if dist.get_rank() == 0 else None)
        if training.scheduler is None or training.scheduler.num_steps == 0:
            training = dataclasses.replace(training, optimizer=None)
        buckets = None if reshardable or training.optimizer is None else buckets_to_save(training.optimizer)
        state = sharded_state(training, loading=False, in_buckets=buckets is not None)
        manifest = _manifest(training, model, step, buckets)
        structure = (*manifest["parts"], reshardable)
        strategy = self._strategies.get(structure) or FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy(), training.context.pg.dp_cp, do_cache_distribution=True
        )
        with _deleted_if_it_fails(target):
            files = _files_in_memory(state, step, target, strategy, is_new=structure not in self._strategies)
        self._strategies[structure] = strategy
        nbytes = sum(file.getbuffer().nbytes for file in files.values())
        self._save = _Save(target, manifest, keep, nbytes, self._writing(files, partial_path(target)))
        return target

    def _writing(self, files: dict[str, io.BytesIO], directory: Path) -> Future[dict[str, FileEntry]]:
        if not self._finishes_at_exit:
            self._finishes_at_exit = True
            atexit.register(self.finish)
        thread = ThreadPoolExecutor(1, "checkpoint")
        written = thread.submit(_write_files, files, directory)
        thread.shutdown(wait=False)  # the thread ends with this save
        return written

    def finish_if_written(self) -> None:
        """Finish the save in flight, if there is one and every rank has written its part.

        Raises:
            DataError: on every rank, if one of them could not write its part; the directory does not appear.
        """
        if self._save is None:
            return
        writing = torch.tensor([not self._save.files.done()], dtype=torch.int32, device=torch.cuda.current_device())
        dist.all_reduce(writing)
        if not writing.item():
            self.finish()

    def finish(self) -> None:
        """Wait for the save in flight, if there is one, and make it the latest checkpoint.

        Raises:
            DataError: on every rank, if one of them could not write its part; what was written is deleted.
        """
        save, self._save = self._save, None
        if save is None:
            return
        with _deleted_if_it_fails(save.target):
            written = raise_on_every_rank(save.wait)
            files = {name: entry for entries in all_gather_values(written) for name, entry in entries.items()}
            complete: Manifest = {**save.manifest, "files": files}
            raise_on_every_rank(lambda: commit(save.target, complete, save.keep) if dist.get_rank() == 0 else None)


@dataclasses.dataclass(frozen=True)
class _Save:
    """A save in flight; ``files`` are those of this rank, with their checksums."""

    target: Path
    manifest: Manifest
    keep: int | None
    nbytes: int
    files: Future[dict[str, FileEntry]]

    def wait(self) -> dict[str, FileEntry]:
        """Return the files of this rank when they are on the disk; raise DataError if they cannot be written."""
        try:
            return self.files.result()
        except OSError as error:
            rank, directory = dist.get_rank(), partial_path(self.target)
            raise DataError(
                f"rank {rank} cannot write the checkpoint {str(directory)!r}, its part of {self.nbytes:,} bytes: "
                f"{error}; {free_space(directory)}",
                path=str(directory),
                rank=rank,
                nbytes=self.nbytes,
                errno=error.errno,
            ) from error


def _manifest(training: TrainingState, model: ModelConfig, step: int, buckets: Buckets | None) -> Manifest:
    optimizer = training.optimizer
    return {
        "format": FORMAT,
        "step": step,
        "layout": layout_of(training),
        "parts": [*training.saved_models, *(["optimizer"] if optimizer is not None else [])],
        "distributed_optimizer": optimizer is not None and optimizer.config.use_distributed_optimizer,
        "optimizer_buckets": buckets,
        "scheduler_steps": 0 if training.scheduler is None else training.scheduler.num_steps,
        "counters": training.counters | ({"reference_in_float32": 1} if training.float32 else {}),
        "vocab_size": vocab_size_of(training),
        "base": training.base,
        "function": computed_function(training, model),
        "files": {},
    }


@contextlib.contextmanager
def _deleted_if_it_fails(target: Path) -> Iterator[None]:
    """Delete what was written if the block raises an error of this project, which it does on every rank."""
    try:
        yield
    except DataError:
        dist.barrier()
        if dist.get_rank() == 0:
            discard_directory(target, target.with_name(_LOCK))
        dist.barrier()
        raise


def _files_in_memory(
    state: dict[str, Any], step: int, target: Path, strategy: FullyParallelSaveStrategyWrapper, *, is_new: bool
) -> dict[str, io.BytesIO]:
    """Return the content of this rank's files, by name (a collective).

    Args:
        state: Megatron's sharded tensors and objects.
        step: the number of the checkpoint.
        target: its directory.
        strategy: divides the writing over the ranks that have the same tensors.
        is_new: whether Megatron checks that the shards of all ranks make whole tensors, which takes a tenth of the
            time; a state of the same structure need not be checked again.

    Raises:
        DataError: on every rank, if one of them fails.
    """
    read_by_megatron_lm = {"iteration": step, "checkpoint_version": 3.0}
    sharded, common = save_preprocess(state | read_by_megatron_lm, validate_access_integrity=is_new)
    if dist.get_world_size(strategy.parallelization_group) > 1:
        strategy.apply_saving_parallelization(sharded)
    by_key: dict[str, list[ShardedBase]] = {}
    for entry in nested_values(sharded):
        if is_main_replica(entry.replica_id):
            key = entry.unique_key if isinstance(entry, ShardedObject) else entry.key
            by_key.setdefault(key, []).append(entry)
    writer, planner = _MemoryWriter(target.name), MCoreSavePlanner(flatten_state_dict=False)
    try:
        with without_crc32():
            checkpoint.save(mcore_to_pyt_state_dict(by_key), storage_writer=writer, planner=planner)
    except checkpoint.CheckpointException as error:  # derives from BaseException
        rank, (cause, _) = min(error.failures.items())
        raise DataError(
            f"rank {rank} cannot copy the state of the checkpoint {str(target)!r}: {cause!r:.300}",
            path=str(target),
            rank=rank,
        ) from error
    files = writer.fs.files
    if dist.get_rank() == 0:
        config = dataclasses.asdict(CheckpointingConfig(strategy.backend, strategy.version))
        files["metadata.json"] = io.BytesIO(json.dumps(config).encode())
        files["common.pt"] = io.BytesIO()
        torch.save(common, files["common.pt"])
    return files


def without_crc32() -> AbstractContextManager[None]:
    """Leave out the CRC-32 of every tensor: it takes as long as the copy, and the manifest has a SHA-256."""
    settings: Any = serialization  # torch adds ``patch`` when it is imported
    return settings.patch({"save.compute_crc32": False})


class _MemoryFile(io.BytesIO):
    """A file that keeps its content when torch closes it."""

    def close(self) -> None:
        """Do nothing."""


class _Memory(FileSystem):
    """Files in host memory, by name."""

    def __init__(self) -> None:
        self.files: dict[str, io.BytesIO] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        file = self.files[Path(path).name] = _MemoryFile()
        yield file

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        pass

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return Path(path).name in self.files


class _MemoryWriter(checkpoint.FileSystemWriter):
    """torch's writer of files with another file system, as its ``FsspecWriter`` is."""

    fs: _Memory

    def __init__(self, name: str) -> None:
        super().__init__(name, sync_files=False)
        self.fs, self.path = _Memory(), name


def _write_files(files: dict[str, io.BytesIO], directory: Path) -> dict[str, FileEntry]:
    """Write the files and flush them to the disk, freeing their memory one by one; return their checksums."""
    entries: dict[str, FileEntry] = {}
    while files:
        name, memory = files.popitem()
        digest, content = hashlib.sha256(), memory.getbuffer()
        with open(directory / name, "wb") as file:
            for start in range(0, len(content), _CHUNK):
                file.write(content[start : start + _CHUNK])
                digest.update(content[start : start + _CHUNK])
            file.flush()
            os.fsync(file.fileno())
        entries[name] = {"size": len(content), "sha256": digest.hexdigest()}
    return entries


# ---- the directory ------------------------------------------------------------------------------------------------


def create_partial(target: Path) -> None:
    """Create an empty directory at ``partial_path(target)``, and lock the directory that it is in.

    Raises:
        DataError: if it cannot be created, or another process saves there.
    """
    start_directory(target, target.with_name(_LOCK), f"the directory of checkpoints {target.parent}")


def commit(target: Path, manifest: Manifest, keep: int | None) -> None:
    """Rename the finished ``partial_path(target)`` to ``target``, point ``latest`` to it, and release the lock.

    Args:
        target: the directory of the checkpoint.
        manifest: written into it first.
        keep: how many checkpoints stay: this one and the newest steps of the others. Remains of interrupted saves are
            deleted too. None keeps everything.

    Raises:
        DataError: a file cannot be written or renamed.
    """
    try:
        _replace(target, manifest)
    except OSError as error:
        raise DataError(f"cannot write the checkpoint {str(target)!r}: {error}", path=str(target)) from error
    if keep is not None:
        _delete_old(target, keep)
    release_lock(target.with_name(_LOCK))


def _replace(target: Path, manifest: Manifest) -> None:
    partial = partial_path(target)
    write_manifest(partial, manifest)
    sync_directory(partial)
    if target.exists():
        replaced = target.with_name(f".{target.name}.replaced")
        delete_directory(replaced)
        target.rename(replaced)
        partial.rename(target)
        delete_obsolete(replaced)
    else:
        partial.rename(target)
    replace_text(target.with_name(LATEST), target.name)
    step = _step_of(target)
    link = target.with_name(_LINK.format(step))
    if not link.exists():
        link.symlink_to(target.name)
    if link.is_symlink():  # else Megatron-LM saved into this directory, and its file names its own newest checkpoint
        replace_text(target.with_name(_LATEST_OF_MEGATRON_LM), str(step))


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rsplit("_", 1)[1])


def _delete_old(target: Path, keep: int) -> None:
    """Delete the oldest steps but never ``target``, which is not the newest if an earlier run made more steps."""
    saved = map(_step_of, target.parent.glob(STEP.format("[0-9]*")))
    steps = sorted(step for step in saved if checkpoint_path(target.parent, step) != target)
    for step in steps[: max(len(steps) + 1 - keep, 0)]:
        delete_obsolete(checkpoint_path(target.parent, step))
    for interrupted in target.parent.glob(f".{STEP.format('[0-9]*')}.*"):
        delete_obsolete(interrupted)
