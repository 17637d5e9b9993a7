"""The content of a checkpoint as Megatron's sharded tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from parallel_state.agreement import all_gather_values
from workers.computed_fields import function_of
from workers.config.model import ModelConfig
from workers.train.state import TrainingState, random_state

Shapes = Mapping[str, Mapping[str, list[int]]]
"""By part, the name and shape of every weight in the whole model, without padding of its vocabulary."""

_OVER_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")

RANDOM = "random"
"""The name of the random states of the ranks, which no checkpoint of Megatron-LM has."""


def layout_of(training: TrainingState) -> dict[str, Any]:
    """Return world size, and size and order of the axes."""
    layout = training.context.layout
    return {
        "world_size": layout.world_size,
        **{axis: getattr(layout, axis) for axis in ("tp", "pp", "cp", "ep", "etp", "vpp", "order")},
    }


def computed_function(training: TrainingState, model: ModelConfig) -> dict[str, Any]:
    """Return the fields with which weights of the same shapes compute something else; see ``function_of``."""
    chunk = next(chunk for chunks in training.models.values() for chunk in chunks)
    return function_of(get_model_config(chunk), model)


def weight_prefix(part: str) -> str:
    """Return the prefix that the names of a part's weights have in a checkpoint."""
    return "" if part == "model" else f"{part}."


def sharded_state(
    training: TrainingState, *, loading: bool, sources: Mapping[str, str] | None = None, in_buckets: bool = False
) -> dict[str, Any]:
    """Return everything as Megatron's sharded tensors and objects, by part and chunk ("model0", "optimizer", ...).

    It is a collective. If the layers of the model differ in what is trained, the state of its optimizer, and adapters,
    are saved by layer: Megatron's tensors of all layers would have holes.

    Args:
        training: the objects to save, or to load into.
        loading: whether the tensors are loaded into.
        sources: by part, the part of the checkpoint that it is read from; None if each is its own.
        in_buckets: whether the state of a distributed optimizer is in its buckets, and not by weights.
    """
    group = training.context.pg.dp_cp
    metadata = {
        "distrib_optim_sharding_type": "dp_reshardable" if in_buckets else "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": group,
    }
    alike = _layers_are_alike(training.model)
    by_layer = metadata if alike else metadata | {"non_homogeneous_layers": True}
    state: dict[str, Any] = {}
    for part, chunks in training.saved_models.items():
        prefix = weight_prefix(part if sources is None else sources[part])
        for index, chunk in enumerate(chunks):
            adapted = is_adapted(chunk)
            weights = unwrap_model(chunk).sharded_state_dict(prefix=prefix, metadata=by_layer if adapted else metadata)
            if adapted:
                weights = {name: weights[name] for name in weights.keys() & _changing(chunk, prefix)}
            for name, value in training.float32[part][index].items() if part in training.float32 else ():
                weights[prefix + name] = _with_values(weights[prefix + name], value)
            state[f"{part}{index}"] = weights
    if training.optimizer is not None:
        chunks = [
            state[f"model{index}"]
            if alike or is_adapted(chunk)
            else unwrap_model(chunk).sharded_state_dict(metadata=by_layer)
            for index, chunk in enumerate(training.model)
        ]
        model = chunks[0] if len(chunks) == 1 else {f"model{index}": chunk for index, chunk in enumerate(chunks)}
        state["optimizer"] = training.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    state[RANDOM] = ShardedObject(RANDOM, random_state(), (world_size,), (rank,))
    return state


def _layers_are_alike(chunks: Sequence[Any]) -> bool:
    """Return whether the same weights are trained in all layers of a model (a collective)."""
    layers: dict[int, set[str]] = defaultdict(set)
    for chunk in map(unwrap_model, chunks):
        for layer in getattr(getattr(chunk, "decoder", None), "layers", ()):  # of a HybridModel, a part of a layer
            trained = (name for name, parameter in layer.named_parameters() if parameter.requires_grad)
            layers[layer.layer_number].update(trained)
    kinds = {tuple(sorted(names)) for names in layers.values()}
    return len(set().union(*all_gather_values(kinds))) <= 1


def is_adapted(chunk: Any) -> bool:
    """Return whether a model chunk has adapters: its checkpoints have what changes, and not the base."""
    return hasattr(unwrap_model(chunk), "lora")


def _changing(chunk: Any, prefix: str) -> set[str]:
    """The names of the tensors that training changes: trained parameters, and buffers."""
    model = unwrap_model(chunk)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {prefix + name for name in trained | {name for name, _ in model.named_buffers()}}


def _with_values(entry: ShardedTensor | ShardedTensorFactory, values: Tensor) -> ShardedTensor | ShardedTensorFactory:
    if isinstance(entry, ShardedTensor):
        return replace(entry, data=values, dtype=values.dtype)
    return replace(entry, data=values)


def vocab_size_of(training: TrainingState) -> int | None:
    """Return the size of the vocabulary without padding, if a chunk of this rank has one."""
    chunks = [unwrap_model(chunk) for chunks in training.saved_models.values() for chunk in chunks]
    return next((chunk.unpadded_vocab_size for chunk in chunks if hasattr(chunk, "unpadded_vocab_size")), None)


def needed_shapes(training: TrainingState, state: Mapping[str, Any], sources: Mapping[str, str]) -> Shapes:
    """Collect the shapes of the weights from all ranks (a collective).

    Args:
        training: the models.
        state: their ``sharded_state``.
        sources: by part, the part of the checkpoint whose names the sharded tensors have.
    """
    mine: dict[str, dict[str, list[int]]] = {part: {} for part in sources}
    vocab_size = vocab_size_of(training)
    for part, source in sources.items():
        for index in range(len(training.models[part])):
            for tensor in sharded_tensors(state[f"{part}{index}"]):
                name = tensor.key.removeprefix(weight_prefix(source))
                mine[part][name] = _unpadded(name, tensor.global_shape, vocab_size)
    ranks = all_gather_values(mine)
    return {part: {name: shape for rank in ranks for name, shape in rank[part].items()} for part in sources}


def saved_shapes(metadata: Metadata, parts: Collection[str], vocab_size: int | None) -> Shapes:
    """Return the shapes of the weights in a checkpoint.

    Args:
        metadata: torch's description of it.
        parts: the parts that it has.
        vocab_size: of its model, without padding.
    """
    shapes: dict[str, dict[str, list[int]]] = {part: {} for part in parts if part != "optimizer"}
    for name, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata) and "optimizer." not in name:
            part = next((part for part in shapes if part != "model" and name.startswith(weight_prefix(part))), "model")
            own_name = name.removeprefix(weight_prefix(part))
            shapes[part][own_name] = _unpadded(own_name, tensor.size, vocab_size)
    return shapes


def _unpadded(name: str, shape: Sequence[int], vocab_size: int | None) -> list[int]:
    if name in _OVER_VOCABULARY and vocab_size is not None:
        return [min(shape[0], vocab_size), *shape[1:]]
    return list(shape)


def sharded_tensors(state: Mapping[Any, Any]) -> Iterator[ShardedTensor]:
    """Return all sharded tensors of a state, including the ones that a factory builds (a gated unit is two tensors)."""
    for value in nested_values(state):
        values = list(nested_values(value.build())) if isinstance(value, ShardedTensorFactory) else [value]
        yield from (tensor for tensor in values if isinstance(tensor, ShardedTensor))
