"""The tensors of this rank as parts of the tensors of the whole model.

Everything that moves weights starts from this description: checkpoints of Hugging Face, exports, transfers between
groups, fingerprints. Checkpoints of training have Megatron's own description (``workers.checkpoint.state``), with which
Megatron-LM reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from mcontroller.errors import DataError
from parallel_state.megatron import MegatronContext
from workers.weights.moves import Move, Span, TensorPart, spans_of

_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..*)")
_PREDICTION = re.compile(r"mtp\.layers\.(\d+)\.(?:transformer_layer\.|mtp_model_layer\.)?(.*)")
_GROUPED_EXPERT = re.compile(r"(.*\.experts\..*\.(?:weight|bias))(\d+)")
_SEPARATE_EXPERT = re.compile(r"(.*\.local_experts\.)(\d+)(\..*)")
_GATED = re.compile(r".*\.linear_fc1\.(weight|bias)\d*")


@dataclass(frozen=True)
class WeightShard:
    """A tensor of this rank, and the part of a tensor of the whole model that it is.

    Attributes:
        part: which part. Its name counts layers and experts over all stages and ranks, layers of multi-token prediction
            after the last one; tied output weights have the embedding's name.
        param: this rank's parameter or buffer.
        merging: returns ``param`` with an adapter added, in new memory; None if it has none.
    """

    part: TensorPart
    param: Tensor
    merging: Callable[[Tensor], Tensor] | None = None

    def values(self) -> Tensor:
        """Return this rank's tensor as it is moved: ``param``, or with an adapter a tensor in new memory."""
        return self.param.data if self.merging is None else self.merging(self.param.data)

    def runs(self) -> Iterator[tuple[int, Tensor]]:
        """Iterate over consecutive indices of the whole tensor along its dim: the first one, and the values."""
        values, dim = self.values(), self.part.dim
        if dim is None:
            yield 0, values.reshape(self.part.shape)
            return
        run: list[Span] = []
        for span in self.part.spans:
            if run and span.start != run[-1].stop:
                yield run[0].start, _joined(values, run, dim)
                run = []
            run.append(span)
        if run:
            yield run[0].start, _joined(values, run, dim)

    def padding(self) -> Tensor:
        """Return the rows of this rank's tensor that pad the vocabulary; usually none."""
        filled = sum(span.stop - span.start for span in self.part.spans) if self.part.dim == 0 else len(self.param)
        return self.param.data[filled:]

    def slice_of(self, full: Tensor) -> Tensor:
        """Return this rank's part of ``full``, the whole tensor; rows of padding are zero."""
        dim = self.part.dim
        if dim is None:
            return full
        slices = [full.narrow(dim, start, stop - start) for start, stop, _ in self.part.spans]
        missing = self.param.size(dim) - sum(values.size(dim) for values in slices)
        if missing:
            slices.append(full.new_zeros(missing, *full.shape[1:]))
        return torch.cat(slices, dim)


def whole_part(name: str, tensor: Tensor) -> TensorPart:
    """Return the description of a tensor that this rank has all of."""
    return TensorPart(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.element_size())


def whole_shard(name: str, tensor: Tensor) -> WeightShard:
    """Return a tensor that this rank has all of."""
    return WeightShard(whole_part(name, tensor), tensor)


class SliceReader:
    """Reads slices of shards. It keeps the last tensor, which may have an adapter added, for the next slice of it.

    Args:
        shards: by slot; their weights must not change while this object exists.
    """

    def __init__(self, shards: Sequence[WeightShard]) -> None:
        self._shards = shards
        self._last: tuple[Tensor, Tensor] | None = None

    def read(self, move: Move) -> Tensor:
        """Return the slice that is moved from one of the shards."""
        shard = self._shards[move.source_slot]
        if self._last is None or self._last[0] is not shard.param:
            self._last = shard.param, shard.values()
        return self._last[1].narrow(move.dim, move.source_start, move.length)


def _joined(values: Tensor, spans: Sequence[Span], dim: int) -> Tensor:
    parts = [values.narrow(dim, offset, stop - start) for start, stop, offset in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def named_shards(chunks: Sequence[torch.nn.Module], context: MegatronContext) -> Iterator[WeightShard]:
    """Iterate over the parameters of this rank's model chunks (wrapped or not), in their order.

    Adapters (``workers.lora``) are not among them: they are added to the weights when these are read.
    """
    for wrapped in chunks:
        chunk = unwrap_model(wrapped)
        adapters = getattr(chunk, "lora", None)
        for local_name, param in chunk.named_parameters():
            if adapters is None:
                yield _shard(chunk, local_name, param, context)
            elif not local_name.startswith("lora."):
                shard = _shard(chunk, local_name, param, context)
                yield replace(shard, merging=adapters.merging(local_name))


def named_buffers(chunks: Sequence[torch.nn.Module], context: MegatronContext) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the persistent buffers of the chunks (a router's biases), by name in the whole model.

    A rank that has a buffer has all of it.
    """
    for wrapped in chunks:
        chunk = unwrap_model(wrapped)
        for prefix, module in chunk.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield _global_name(chunk, f"{prefix}.{name}".lstrip("."), context), buffer


def model_shards(chunks: Sequence[torch.nn.Module], context: MegatronContext) -> list[WeightShard]:
    """Return the parameters and the persistent buffers of this rank's model chunks."""
    return [*named_shards(chunks, context), *starmap(whole_shard, named_buffers(chunks, context))]


def check_movable(shards: Sequence[WeightShard]) -> None:
    """Raise DataError if there are shards that cannot be moved.

    They are quantized, have no dims, or are divided in a way that does not follow from their names.
    """
    names = [shard.part.name for shard in shards if not _is_movable(shard)]
    if names:
        raise DataError(
            f"cannot move the weights {', '.join(names)}: expected plain tensors with at least one dim, divided evenly;"
            " of experts only linear_fc1 and linear_fc2 of decoder layers, grouped or one by one",
            names=names,
        )


def _is_movable(shard: WeightShard) -> bool:
    name, param = shard.part.name, shard.param
    numbered = name.startswith("decoder.layers.") and ".linear_fc" in name
    is_expert = ".experts." in name and isinstance(param, torch.nn.Parameter)
    return type(param.data) is Tensor and param.dim() > 0 and (numbered or not is_expert)


def _shard(chunk: Any, local_name: str, param: torch.nn.Parameter, context: MegatronContext) -> WeightShard:
    name = _global_name(chunk, local_name, context)
    expert = ".experts." in name
    dim: int | None = getattr(param, "partition_dim", None) if getattr(param, "tensor_model_parallel", False) else None
    if expert and ".linear_fc" in name:  # Transformer Engine marks all of an expert's weights as divided at dim 0
        dim = 0 if ".linear_fc1." in name else 1 if ".weight" in name else None
    if dim is None:
        return whole_shard(name, param)
    group = context.pg.expt_tp if expert else context.pg.tp
    shape, ways, index = list(param.shape), group.size(), group.rank()
    shape[dim] *= ways
    if dim == 0 and name in ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias"):
        shape[0] = getattr(chunk, "unpadded_vocab_size", chunk.vocab_size)
    gated = getattr(chunk.config, "gated_linear_unit", False) and _GATED.fullmatch(name) is not None
    spans = spans_of(param.size(dim), 2 if gated else 1, ways, index, shape[dim])
    if sizes := getattr(param, "partition_sizes", None):  # several tensors of different sizes stacked, as Mamba's
        starts = [sum(sizes[:place]) for place in range(len(sizes))]
        spans = tuple(
            Span(start * ways + index * size, start * ways + (index + 1) * size, start)
            for start, size in zip(starts, sizes, strict=True)
        )
    return WeightShard(whole_part(name, param)._replace(shape=tuple(shape), dim=dim, spans=spans), param)


def _global_name(chunk: Any, local_name: str, context: MegatronContext) -> str:
    if local_name == "output_layer.weight" and getattr(chunk, "share_embeddings_and_output_weights", False):
        return "embedding.word_embeddings.weight"
    name = local_name
    if of_prediction := _PREDICTION.fullmatch(name):
        name = f"decoder.layers.{chunk.config.num_layers + int(of_prediction[1])}.{of_prediction[2]}"
    elif in_layer := _LAYER.fullmatch(name):
        layer = chunk.decoder.layers[int(in_layer[2])]
        name = f"{in_layer[1]}{layer.layer_number - 1}{in_layer[3]}"
    if _LAYER.fullmatch(name) and (expert := _GROUPED_EXPERT.fullmatch(name) or _SEPARATE_EXPERT.fullmatch(name)):
        per_rank = chunk.config.num_moe_experts // context.pg.ep.size()
        number = context.pg.ep.rank() * per_rank + int(expert[2])
        name = f"{expert[1]}{number}{''.join(expert.groups()[2:])}"
    return name
