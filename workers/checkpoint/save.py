"""Saving a checkpoint in Megatron's distributed format, which any layout can load.

A checkpoint is a directory ``global_step_<n>`` that appears atomically: it is written under a temporary name and
renamed when every rank has finished. In addition to Megatron's files it has ``manifest.json``, so that an unsuitable
checkpoint is rejected with the names and shapes that differ, and a damaged one with the file. The file ``latest`` in
the parent directory names the newest one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mcontroller.errors import ConfigError, DataError, before_changes
from parallel_state.agreement import raise_on_every_rank
from workers.checkpoint.checksums import FileEntry
from workers.checkpoint.directories import (
    Buckets,
    Manifest,
    checkpoint_path,
    commit,
    create_partial,
    delete_partial,
    partial_path,
)
from workers.checkpoint.optimizer_state import buckets_to_save
from workers.checkpoint.state import layout_of, sharded_state, weight_shapes
from workers.checkpoint.writer import BackgroundSaves, prepare_write
from workers.train.state import TrainingState

__all__ = ["save_checkpoint"]


def save_checkpoint(
    training: TrainingState,
    path: str | os.PathLike[str],
    step: int,
    keep: int | None = None,
    background: BackgroundSaves | None = None,
    reshardable: bool = True,
) -> Path:
    """Write ``<path>/global_step_<step>`` and point ``latest`` to it (a collective).

    Args:
        training: the objects to save. The optimizer is saved only if its schedule has made a step.
        path: a directory on a file system that all nodes share.
        step: the number in the directory's name.
        keep: how many checkpoints stay under ``path``: this one and the newest steps of the others; None keeps all.
        background: writes the checkpoint while the caller goes on; the directory appears when it has finished.
        reshardable: save the state of a distributed optimizer by weights, which any layout loads. It is gathered over
            the data-parallel ranks, each of which holds all of it in host memory for that. False: in its buckets,
            without communication; it loads with the same axes but dp and cp.

    Returns:
        The directory of the checkpoint.

    Raises:
        ConfigError: ``keep`` is less than 1.
        DataError: on every rank, if one of them cannot write. What it has written is deleted; earlier checkpoints stay.
            With ``background``, the error may be raised when the save is finished.
    """
    if keep is not None and keep < 1:
        text = f"save_checkpoint: max_to_keep is {keep}; it must be at least 1, or None to keep all"
        with before_changes():
            raise ConfigError(text, key="max_to_keep", value=keep)
    if background is not None:
        background.finish()
    target = checkpoint_path(Path(path), step)
    with before_changes():
        raise_on_every_rank(lambda: create_partial(target) if dist.get_rank() == 0 else None)
    if training.scheduler is None or training.scheduler.num_steps == 0:
        training = dataclasses.replace(training, optimizer=None)
    buckets = None if reshardable or training.optimizer is None else buckets_to_save(training.optimizer)
    state = sharded_state(training, loading=False, in_buckets=buckets is not None)
    commit_here = functools.partial(_commit, target, _manifest(training, state, step, buckets), keep)
    common = {"iteration": step, "checkpoint_version": 3.0}  # what Megatron-LM asks for
    with _deleted_if_it_fails(target):
        write = prepare_write(state | common, partial_path(target), training.context.pg.dp_cp, commit_here)
        if background is None:
            write.write()
            write.finish()
    if background is not None:
        background.begin(write, functools.partial(_deleted_if_it_fails, target))
    return target


@contextlib.contextmanager
def _deleted_if_it_fails(target: Path) -> Iterator[None]:
    """Delete what was written if the block raises an error of this project, which it does on every rank."""
    try:
        yield
    except DataError:
        dist.barrier()
        if dist.get_rank() == 0:
            delete_partial(target)
        dist.barrier()
        raise


def _commit(target: Path, manifest: Manifest, keep: int | None, files: Mapping[str, FileEntry]) -> None:
    complete: Manifest = {**manifest, "files": dict(files)}
    raise_on_every_rank(lambda: commit(target, complete, keep) if dist.get_rank() == 0 else None)


def _manifest(training: TrainingState, state: Mapping[str, Any], step: int, buckets: Buckets | None) -> Manifest:
    optimizer = training.optimizer
    return {
        "format": 3,
        "step": step,
        "layout": layout_of(training),
        "parts": [*training.models, *(["optimizer"] if optimizer is not None else [])],
        "distributed_optimizer": optimizer is not None and optimizer.config.use_distributed_optimizer,
        "optimizer_buckets": buckets,
        "scheduler_steps": 0 if training.scheduler is None else training.scheduler.num_steps,
        "counters": training.counters | ({"reference_in_float32": 1} if training.float32 else {}),
        "weights": weight_shapes(training, state, {part: part for part in training.models}),
        "files": {},
    }
