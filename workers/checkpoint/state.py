"""The state that the components of a worker share and a checkpoint contains, and its form as sharded tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model
from torch import Tensor

from parallel_state.agreement import all_gather_values
from parallel_state.errors import ParallelStateError
from parallel_state.megatron import MegatronContext
from workers.checkpoint.manifest import Shapes

__all__ = [
    "TrainingState",
    "layout_of",
    "random_state",
    "set_random_state",
    "sharded_state",
    "weight_prefix",
    "weight_shapes",
]


@dataclass
class TrainingState:
    """The models of a worker on this rank, and what trains them: shared by its components, and saved in a checkpoint.

    Attributes:
        context: the layout of this rank.
        models: by part ("model", "reference"), the model chunks of this rank; inside DistributedDataParallel if they
            are trained. Empty until they are built.
        optimizer: of the part "model"; None if it is not trained. Saved only if it has made a step.
        scheduler: the learning-rate schedule of the optimizer.
        counters: go into the manifest: ``phase``, the phase of training that the optimizer belongs to; ``updates``, the
            calls that trained the model; ``optimizer_steps``, those of this optimizer; ``ended_phases``, joined by
            commas, those whose optimizer has made steps and was replaced.
        float32: by part, for every chunk, copies in float32 of weights by name, which a checkpoint contains instead.
        weights_version: a number that changes whenever the weights may have changed. Not saved.
        gradients: the ``Gradients`` that ``optim_step`` applies; None if there are none. Not saved.
    """

    context: MegatronContext
    models: dict[str, list[Any]] = field(default_factory=dict)
    optimizer: MegatronOptimizer | None = None
    scheduler: OptimizerParamScheduler | None = None
    counters: dict[str, Any] = field(default_factory=lambda: {"phase": "", "updates": 0, "optimizer_steps": 0})
    float32: dict[str, list[dict[str, Tensor]]] = field(default_factory=dict)
    weights_version: int = 0
    gradients: Any = None

    @property
    def model(self) -> list[Any]:
        """The chunks of the part "model"; none before they are built."""
        return self.models.get("model", [])

    def check_context(self) -> None:
        """Raise unless Megatron's globals are those of this worker.

        Raises:
            ParallelStateError: the caller is outside the worker's context.
        """
        if not self.context.is_active:
            raise ParallelStateError(
                "a method of a worker was called outside its Megatron context: call it through a group, or inside "
                "`with worker.call_context(method):`"
            )


def layout_of(training: TrainingState) -> dict[str, Any]:
    """Return world size, and size and order of the axes."""
    layout = training.context.layout
    return {
        "world_size": layout.world_size,
        **{axis: getattr(layout, axis) for axis in ("tp", "pp", "cp", "ep", "etp", "vpp", "order")},
    }


def weight_prefix(part: str) -> str:
    """Return the prefix that the names of a part's weights have in a checkpoint."""
    return "" if part == "model" else f"{part}."


def sharded_state(
    training: TrainingState, *, loading: bool, sources: Mapping[str, str] | None = None, in_buckets: bool = False
) -> dict[str, Any]:
    """Return everything as Megatron's sharded tensors and objects, by part and chunk ("model0", "optimizer", ...).

    Args:
        training: the objects to save, or to load into.
        loading: whether the tensors are those to load into.
        sources: by part, the part of the checkpoint that it is read from; None if each is its own.
        in_buckets: whether the state of a distributed optimizer is in its buckets, and not by weights.
    """
    group = training.context.pg.dp_cp
    metadata = {
        "distrib_optim_sharding_type": "dp_reshardable" if in_buckets else "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": group,
    }
    state: dict[str, Any] = {}
    for part, chunks in training.models.items():
        prefix = weight_prefix(part if sources is None else sources[part])
        for index, chunk in enumerate(chunks):
            weights = unwrap_model(chunk).sharded_state_dict(prefix=prefix, metadata=metadata)
            for name, value in training.float32[part][index].items() if part in training.float32 else ():
                weights[prefix + name] = _with_values(weights[prefix + name], value)
            state[f"{part}{index}"] = weights
    if training.optimizer is not None:
        chunks = [state[f"model{index}"] for index in range(len(training.models["model"]))]
        model = chunks[0] if len(chunks) == 1 else {f"model{index}": chunk for index, chunk in enumerate(chunks)}
        state["optimizer"] = training.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    state["random"] = ShardedObject("random", random_state(), (world_size,), (rank,))
    return state


def _with_values(entry: ShardedTensor | ShardedTensorFactory, values: Tensor) -> ShardedTensor | ShardedTensorFactory:
    if isinstance(entry, ShardedTensor):
        return replace(entry, data=values, dtype=values.dtype)
    return replace(entry, data=values)


def weight_shapes(training: TrainingState, state: Mapping[str, Any], sources: Mapping[str, str]) -> Shapes:
    """Collect the shapes of the weights from all ranks (a collective).

    Args:
        training: the models.
        state: their ``sharded_state``.
        sources: by part, the part of the checkpoint whose names the sharded tensors have.
    """
    mine: dict[str, dict[str, list[int]]] = {part: {} for part in sources}
    for part, source in sources.items():
        for index, chunk in enumerate(training.models[part]):
            vocab_size = getattr(unwrap_model(chunk), "unpadded_vocab_size", None)
            for tensor in _sharded_tensors(state[f"{part}{index}"]):
                shape = list(tensor.global_shape)
                if tensor.allow_shape_mismatch and vocab_size is not None:
                    shape[0] = min(shape[0], vocab_size)
                mine[part][tensor.key.removeprefix(weight_prefix(source))] = shape
    ranks = all_gather_values(mine)
    return {part: {name: shape for rank in ranks for name, shape in sorted(rank[part].items())} for part in sources}


def _sharded_tensors(weights: Mapping[str, Any]) -> Iterator[ShardedTensor]:
    """All sharded tensors of a chunk, with those that a factory builds (gated units are made of two tensors)."""
    for value in weights.values():
        values = list(nested_values(value.build())) if isinstance(value, ShardedTensorFactory) else [value]
        yield from (tensor for tensor in values if isinstance(tensor, ShardedTensor))


def random_state() -> dict[str, Any]:
    """Return the random state of this rank."""
    return {
        "host": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the random state of this rank, to one of ``random_state``."""
    torch.set_rng_state(state["host"])
    torch.cuda.set_rng_state(state["device"])
    get_cuda_rng_tracker().set_states(state["tracker"])
