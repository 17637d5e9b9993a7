"""The tensors of this rank as plain descriptions, from which transfers of weights are planned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from parallel_state.megatron import MegatronContext
from workers.weights.refit_plan import LocalTensor, spans_of
from workers.weights.shards import WeightShard, named_buffers, named_shards

__all__ = ["described_tensors", "padding_rows"]


def described_tensors(
    chunks: Sequence[nn.Module], context: MegatronContext
) -> tuple[list[Tensor], list[LocalTensor], list[str]]:
    """Return this rank's tensors, their positions in the whole model, and the names of those of unknown position."""
    tensors: list[Tensor] = []
    described: list[LocalTensor] = []
    unknown: list[str] = []
    for shard in named_shards(chunks, context):
        tensors.append(shard.param)
        described.append(_local_tensor(shard))
        if _is_unknown(shard):
            unknown.append(shard.name)
    for name, buffer in named_buffers(chunks, context):
        tensors.append(buffer)
        described.append(_whole(name, tuple(buffer.shape), buffer))
        if buffer.dim() == 0:
            unknown.append(name)
    return tensors, described, unknown


def _local_tensor(shard: WeightShard) -> LocalTensor:
    whole = _whole(shard.name, shard.full_shape, shard.param)
    if shard.dim is None:
        return whole
    length, limit = shard.param.size(shard.dim), shard.full_shape[shard.dim]
    spans = spans_of(length, shard.pieces, shard.group.size(), shard.group.rank(), limit)
    return whole._replace(dim=shard.dim, spans=spans)


def _whole(name: str, shape: tuple[int, ...], tensor: Tensor) -> LocalTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return LocalTensor(name, shape, dtype, tensor.element_size(), contiguous=tensor.is_contiguous())


def _is_unknown(shard: WeightShard) -> bool:
    """Whether a weight is quantized, has no dims, or is divided in a way that does not follow from its name."""
    quantized = type(shard.param.data) is not Tensor
    uneven = hasattr(shard.param, "partition_sizes")  # several tensors of different sizes stacked, as Mamba's
    numbered = shard.name.startswith("decoder.layers.") and ".linear_fc" in shard.name
    return quantized or shard.param.dim() == 0 or uneven or (shard.expert and not numbered)


def padding_rows(chunks: Sequence[nn.Module], context: MegatronContext) -> Iterator[Tensor]:
    """Iterate over the rows of this rank's tensors that pad the vocabulary."""
    for shard in named_shards(chunks, context):
        if shard.rows is not None:
            filled = min(max(shard.rows - shard.group.rank() * shard.param.size(0), 0), shard.param.size(0))
            yield shard.param.data[filled:]
