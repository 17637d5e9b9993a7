"""The state of a rank in a file in memory, from which a worker in the same place of the same layout goes on.

Each rank has a file with all of its own state, and reads nothing else. So there is no plan that ranks make together,
and after the loss of a rank only its own file has to be copied.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypedDict

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from torch import Tensor

from mcontroller.errors import DataError
from workers.checkpoint.load import load_models, load_optimizer
from workers.checkpoint.optimizer_state import buckets_to_save
from workers.checkpoint.save import without_crc32
from workers.checkpoint.state import sharded_state
from workers.checkpoint.unpickle import known_types
from workers.train.state import TrainingState, set_random_state


class RankFileContent(TypedDict):
    """The content of a file."""

    state: dict[str, Any]
    """By part and chunk as ``sharded_state`` has them, the values of this rank."""
    in_buckets: bool
    """Whether the state of a distributed optimizer is in its buckets."""
    replicas: int
    """The number of data-parallel replicas, which the buckets depend on."""
    scheduler_steps: int
    """Steps of the learning-rate schedule so far."""
    counters: dict[str, Any]
    """Counters of the worker, see ``TrainingState``."""
    float32: bool
    """Whether the reference is in float32."""


def save_state(training: TrainingState, path: str) -> None:
    """Write the state of this rank to a file (a collective).

    Args:
        training: the objects to save. The optimizer is saved only if its schedule has made a step.
        path: an empty file.
    """
    steps = 0 if training.scheduler is None else training.scheduler.num_steps
    if steps == 0:
        training = dataclasses.replace(training, optimizer=None)
    in_buckets = training.optimizer is not None and buckets_to_save(training.optimizer) is not None
    state = dict_list_map_outplace(_local_value, sharded_state(training, loading=False, in_buckets=in_buckets))
    content = RankFileContent(
        state=state,
        in_buckets=in_buckets,
        replicas=training.context.layout.dp,
        scheduler_steps=steps,
        counters=dict(training.counters),
        float32=bool(training.float32),
    )
    with without_crc32():
        torch.save(content, path)


def _local_value(value: Any) -> Any:
    if isinstance(value, ShardedBase):
        value = value.data
    if isinstance(value, LocalNonpersistentObject):
        value = value.unwrap()
    return value.detach() if isinstance(value, Tensor) else value


def read_state(path: str) -> RankFileContent:
    """Return the content of a file that ``save_state`` has written."""
    with known_types():
        content: RankFileContent = torch.load(path, map_location="cpu", weights_only=True)
    return content


def check_replicas(training: TrainingState, content: RankFileContent) -> None:
    """Raise DataError if the optimizer's state is divided over another number of data-parallel replicas."""
    replicas = training.context.layout.dp
    if content["in_buckets"] and content["replicas"] != replicas:
        raise DataError(
            f"the optimizer's state in memory is divided over {content['replicas']} data-parallel replicas, and this "
            f"group has {replicas}: load a checkpoint that was saved with reshardable=True"
        )


def load_state(training: TrainingState, content: RankFileContent) -> None:
    """Load the state of this rank into the models, the optimizer and the schedule (a collective)."""
    state = content["state"]
    optimizer = training.optimizer if "optimizer" in state else None
    loading = dataclasses.replace(training, optimizer=optimizer)
    sharded_state(loading, loading=True, in_buckets=content["in_buckets"])  # makes the optimizer's state
    load_models(training, state, {part: part for part in training.saved_models})
    load_optimizer(training, state.get("optimizer"), content["scheduler_steps"])
    set_random_state(state["random"])
