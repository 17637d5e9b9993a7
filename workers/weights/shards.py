"""The parameters of this rank as parts of the tensors of the whole model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from parallel_state.megatron import MegatronContext

__all__ = ["WeightShard", "named_buffers", "named_shards"]

_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..*)")
_GROUPED_EXPERT = re.compile(r"(.*\.experts\..*\.(?:weight|bias))(\d+)")
_SEPARATE_EXPERT = re.compile(r"(.*\.local_experts\.)(\d+)(\..*)")
_GATED = re.compile(r".*\.linear_fc1\.(weight|bias)\d*")


@dataclass(frozen=True)
class WeightShard:
    """One parameter of this rank, and the part of a tensor of the whole model that it is.

    Attributes:
        name: the name of that tensor: layers and experts are counted over all stages and ranks, and tied output
            weights have the embedding's name.
        param: this rank's part.
        dim: the dim that is divided over ``group``; None if every rank has the whole tensor.
        pieces: number of tensors stacked along ``dim``, each divided separately (2: gate and up of a gated unit).
        rows: the size of dim 0 in the whole model, without padding, of a tensor that is padded (a vocabulary);
            else None.
        group: the tp or the etp group.
        expert: whether it is an expert's weight: replicated over edp, and not over the dp of dense weights.
    """

    name: str
    param: torch.nn.Parameter
    dim: int | None
    pieces: int
    rows: int | None
    group: torch.distributed.ProcessGroup
    expert: bool

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the whole model, without padding."""
        shape = list(self.param.shape)
        if self.dim is not None:
            shape[self.dim] *= self.group.size()
        if self.rows is not None:
            shape[0] = self.rows
        return tuple(shape)

    def slice_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of ``full``, a tensor of ``full_shape``; rows of padding are zero."""
        if self.dim is None:
            return full
        if self.rows is not None:
            padding = self.param.size(0) * self.group.size() - self.rows
            full = torch.cat([full, full.new_zeros(padding, *full.shape[1:])]) if padding else full
        size, rank = self.group.size(), self.group.rank()
        pieces = full.chunk(self.pieces, self.dim)
        return torch.cat([piece.chunk(size, self.dim)[rank] for piece in pieces], self.dim)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole tensor from the parts of all ranks of ``group``, in rank order."""
        if self.dim is None:
            return parts[0]
        pieces = [part.chunk(self.pieces, self.dim) for part in parts]
        full = torch.cat([piece for stacked in zip(*pieces, strict=True) for piece in stacked], self.dim)
        return full if self.rows is None else full[: self.rows]


def named_shards(chunks: Sequence[torch.nn.Module], context: MegatronContext) -> Iterator[WeightShard]:
    """Iterate over the parameters of this rank's model chunks (wrapped or not), in their order."""
    for wrapped in chunks:
        chunk = unwrap_model(wrapped)
        for local_name, param in chunk.named_parameters():
            yield _shard(chunk, local_name, param, context)


def named_buffers(chunks: Sequence[torch.nn.Module], context: MegatronContext) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the persistent buffers of the chunks (a router's biases), by name in the whole model.

    A rank that has a buffer has all of it.
    """
    for wrapped in chunks:
        chunk = unwrap_model(wrapped)
        for prefix, module in chunk.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield _global_name(chunk, f"{prefix}.{name}".lstrip("."), context), buffer


def _shard(chunk: Any, local_name: str, param: torch.nn.Parameter, context: MegatronContext) -> WeightShard:
    name = _global_name(chunk, local_name, context)
    expert = ".experts." in name
    dim: int | None = getattr(param, "partition_dim", None) if getattr(param, "tensor_model_parallel", False) else None
    if expert and ".linear_fc" in name:  # Transformer Engine marks all of an expert's weights as divided at dim 0
        dim = 0 if ".linear_fc1." in name else 1 if ".weight" in name else None
    gated = getattr(chunk.config, "gated_linear_unit", False) and _GATED.fullmatch(name) is not None
    over_vocabulary = name in ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
    return WeightShard(
        name=name,
        param=param,
        dim=dim,
        pieces=2 if gated else 1,
        rows=getattr(chunk, "unpadded_vocab_size", chunk.vocab_size) if over_vocabulary and dim == 0 else None,
        group=context.pg.expt_tp if expert else context.pg.tp,
        expert=expert,
    )


def _global_name(chunk: Any, local_name: str, context: MegatronContext) -> str:
    if local_name == "output_layer.weight" and getattr(chunk, "share_embeddings_and_output_weights", False):
        return "embedding.word_embeddings.weight"
    name = local_name
    if in_layer := _LAYER.fullmatch(name):
        layer = chunk.decoder.layers[int(in_layer[2])]
        name = f"{in_layer[1]}{layer.layer_number - 1}{in_layer[3]}"
        if expert := _GROUPED_EXPERT.fullmatch(name) or _SEPARATE_EXPERT.fullmatch(name):
            per_rank = chunk.config.num_moe_experts // context.pg.ep.size()
            number = context.pg.ep.rank() * per_rank + int(expert[2])
            name = f"{expert[1]}{number}{''.join(expert.groups()[2:])}"
    return name
