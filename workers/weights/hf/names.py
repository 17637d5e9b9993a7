"""The parameters and buffers of this rank as parts of the tensors of a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.utils import get_model_config, unwrap_model

from mcontroller.errors import DataError
from parallel_state.megatron import MegatronContext
from workers.weights.hf.family import MODEL_FAMILIES, ModelFamily, hf_names_of, matching_family
from workers.weights.moves import Span, TensorPart
from workers.weights.shards import WeightShard, named_buffers, named_shards, whole_shard

OUTPUT_LAYER = "output_layer.weight"


def hf_shards(
    chunks: Sequence[torch.nn.Module], context: MegatronContext, family: ModelFamily | None, *, complete: bool = True
) -> list[WeightShard]:
    """Return this rank's parts of the Hugging Face tensors, in the order of the model.

    q, k and v, or gate and up, which are one parameter of Megatron, are parts of as many tensors.

    Args:
        chunks: this rank's model chunks, wrapped or not.
        context: their layout.
        family: the family whose names to use; None for a model that no family matches: the names of any family.
        complete: whether these tensors are to be the whole model.

    Raises:
        DataError: the family has no such tensor; or ``complete``, and a buffer of the model has a value and no name in
            the family, such as a learned bias of experts.
    """
    if (bridge := bridge_of(chunks)) is not None:
        return bridge.shards(chunks)
    shards = []
    for chunk in chunks:
        config = get_model_config(chunk)
        shards += [part for shard in named_shards([chunk], context) for part in _parts(shard, family, config)]
        for name, buffer in named_buffers([chunk], context):
            if hf_names_of(family, name):
                shards += _parts(whole_shard(name, buffer), family, config)
            elif complete and bool(buffer.any()):
                text = f"{name} is a buffer and not 0: it has no counterpart in a Hugging Face checkpoint"
                raise DataError(text, tensor=name)
    return shards


def with_copies(
    shards: Sequence[WeightShard], chunks: Sequence[torch.nn.Module], family: ModelFamily
) -> list[WeightShard]:
    """Return the parts, and those of the copies that layers of multi-token prediction have in the files."""
    every = list(shards)
    for shard in shards:
        copies = copies_of(chunks, family).get(shard.part.name, ())
        every += [replace(shard, part=shard.part._replace(name=name)) for name in copies]
    return every


def copies_of(chunks: Sequence[torch.nn.Module], family: ModelFamily | None) -> dict[str, list[str]]:
    """Return the names of copies by the name of the tensor that is copied, both in the files."""
    chunk: Any = unwrap_model(chunks[0])
    first = get_model_config(chunk).num_layers
    layers = range(first, first + getattr(chunk, "prediction_layers", 0))
    if family is None or not layers:
        return {}
    return {
        family.names[name][0]: [copy.format(layer=layer) for layer in layers] for name, copy in family.copies.items()
    }


def bridge_of(chunks: Sequence[torch.nn.Module]) -> Any:
    """Return the ``workers.model.bridge.BridgeWeights`` of a model that Megatron-Bridge has built, or None."""
    return getattr(unwrap_model(chunks[0]), "bridge", None)


def model_family(chunks: Sequence[torch.nn.Module]) -> ModelFamily | None:
    """Return the family that the chunks name; if they name none, the one that is built like them, if any is."""
    model_type = getattr(unwrap_model(chunks[0]), "model_family", None)
    if model_type is not None:
        return MODEL_FAMILIES.get_or_raise(model_type, "model.family")
    return matching_family(vars(get_model_config(chunks[0])))


def weight_names(chunks: Sequence[torch.nn.Module]) -> Callable[[str], tuple[str, ...]]:
    """Return what maps Megatron's name of a weight to the tensors that it consists of (see ``hf_names_of``)."""
    bridge = bridge_of(chunks)
    return partial(hf_names_of, model_family(chunks)) if bridge is None else bridge.names(chunks)


def names_of(family: ModelFamily | None) -> Mapping[str, tuple[str, ...]]:
    """Return the names of a family's weights (see ``ModelFamily.names``); for None, of all families together."""
    if family is not None:
        return family.names
    return {name: theirs for family in reversed([*MODEL_FAMILIES.values()]) for name, theirs in family.names.items()}


def _parts(shard: WeightShard, family: ModelFamily | None, config: Any) -> Iterator[WeightShard]:
    part, names = shard.part, _hf_names(shard.part, family, config)
    if len(names) == 1:
        yield replace(shard, part=part._replace(name=names[0]))
        return
    length = shard.param.size(0)
    ways, index = part.shape[0] // length, part.spans[0].start * len(part.spans) // length if part.spans else 0
    rows = rows_of_pieces(length, len(names), config)
    blocks = length // sum(rows)
    before = 0
    for name, height in zip(names, rows, strict=True):
        spans = tuple(
            Span(start := (index * blocks + block) * height, start + height, block * sum(rows) + before)
            for block in range(blocks)
        )
        shape = (ways * blocks * height, *part.shape[1:])
        yield replace(shard, part=part._replace(name=name, shape=shape, dim=0, spans=spans))
        before += height


def _hf_names(part: TensorPart, family: ModelFamily | None, config: Any) -> tuple[str, ...]:
    """The names of the tensors that the parameter consists of."""
    names = hf_names_of(family, part.name)
    if part.name == OUTPUT_LAYER and part.shape[0] == 1:  # a value head: no vocabulary is as small
        names = ((family or ModelFamily).value_head,)
    gated = config.gated_linear_unit or ".linear_fc1." not in part.name
    output_gate = part.name.startswith("decoder.layers.") and getattr(config, "attention_output_gate", False)
    if not names or (len(names) > 1 and not gated) or output_gate:
        of = family.model_type if family else ", ".join(MODEL_FAMILIES)
        raise DataError(
            f"{part.name} has no counterpart in a Hugging Face checkpoint of {of} (the built-in families have RMSNorm,"
            " gated units, and no biases except of q, k and v)",
            tensor=part.name,
        )
    return names


def rows_of_pieces(length: int, pieces: int, config: Any) -> tuple[int, ...]:
    """Return the rows that each tensor has in a block of a stacked weight.

    Args:
        length: rows of the rank's weight.
        pieces: three are q, k and v, with a block for each query group; two are gate and up, in one block.
        config: Megatron's, of the model.
    """
    if pieces == 3:
        width = config.kv_channels
        return config.num_attention_heads // config.num_query_groups * width, width, width
    return (length // pieces,) * pieces
