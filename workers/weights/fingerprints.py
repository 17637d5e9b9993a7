"""Fingerprints of weights: one number per tensor that is the same in every layout.

The fingerprint of a tensor is the sum, modulo 2**64, of the bits of every element times a key of each of its indices in
the tensor of the whole model. Each rank adds up its own part, and the sums of ranks with different parts are added. So
no rank needs the whole tensor, and two layouts of the same weights have the same fingerprints, on a CPU and on a GPU.
Keys are odd, so every change of one element changes it, as do two exchanged elements, rows or columns. It is a check
against errors, not against an attacker. Zeros of both signs, and numbers of float32 and bfloat16 below 1.2e-38, count
as 0: an engine's kernels may compute with them as 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_state.megatron import MegatronContext
from workers.weights.hashing.bit_sums import IndexKeys, sum_of_bits
from workers.weights.refit_plan import Span, spans_of
from workers.weights.shards import WeightShard, named_buffers, named_shards

__all__ = ["Fingerprint", "TensorPart", "model_fingerprints", "part_fingerprints", "tensor_fingerprints"]


class Fingerprint(NamedTuple):
    """The fingerprint of one tensor of the whole model.

    Attributes:
        name: the tensor's name. Copies of a tensor (a packed output layer of tied embeddings) have the same name.
        dtype: the name of the dtype whose bits were hashed, such as ``bfloat16``.
        value: a signed 64-bit integer.
    """

    name: str
    dtype: str
    value: int


class TensorPart(NamedTuple):
    """The part of one tensor of the whole model that a rank has.

    Attributes:
        name: the name of that tensor.
        tensor: this rank's part.
        shape: the shape of the whole tensor, without padding.
        dim: the dim that is divided; None if the rank has all of it.
        spans: the parts of that dim that the rank has; padding is in none.
        group: the ranks that have the other parts; None if the rank has all of it.
        expert: whether it is an expert's weight, whose group is another than that of dense weights.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    dim: int | None = None
    spans: tuple[Span, ...] = ()
    group: dist.ProcessGroup | None = None
    expert: bool = False


def tensor_fingerprints(tensors: Iterable[tuple[str, Tensor]]) -> list[Fingerprint]:
    """Return the fingerprints of whole tensors, such as an engine's ``named_parameters()``.

    An engine that packs several tensors into one passes the slices, each under the tensor's own name. A copy is passed
    once more, under the name of the tensor that it is a copy of.

    Args:
        tensors: names and tensors, read one at a time.
    """
    return part_fingerprints(TensorPart(name, tensor, tuple(tensor.shape)) for name, tensor in tensors)


def model_fingerprints(
    chunks: Sequence[nn.Module], context: MegatronContext, dtypes: Mapping[str, Collection[str]] | None = None
) -> list[Fingerprint]:
    """Return the fingerprints of this rank's parameters and persistent buffers, under their names in the whole model.

    Each is that of the whole tensor, on every rank that has a part of it (a collective over the tp and etp groups).

    Args:
        chunks: this rank's model chunks, wrapped or not.
        context: their layout.
        dtypes: see ``part_fingerprints``.
    """
    return part_fingerprints(_model_parts(chunks, context), dtypes)


@torch.no_grad()
def part_fingerprints(
    parts: Iterable[TensorPart], dtypes: Mapping[str, Collection[str]] | None = None
) -> list[Fingerprint]:
    """Return the fingerprints of the whole tensors that this rank has parts of (a collective over their groups).

    All ranks of a group pass the same names in the same sequence. The device is synchronized once.

    Args:
        parts: this rank's parts, read one at a time.
        dtypes: by name, the dtypes that the values are converted to first, as a receiver does; a tensor that is not in
            it, or all if it is None, is taken as it is.
    """
    keys: list[tuple[str, str]] = []
    sums: list[Tensor] = []
    divided: dict[tuple[bool, dist.ProcessGroup], list[int]] = {}
    of_dims = IndexKeys()
    for part in parts:
        for dtype in sorted((dtypes or {}).get(part.name, ())) or [_dtype_name(part.tensor)]:
            if part.group is not None and part.group.size() > 1:
                divided.setdefault((part.expert, part.group), []).append(len(sums))
            keys.append((part.name, dtype))
            sums.append(_sum_of(part, getattr(torch, dtype), of_dims))
    if not sums:
        return []
    totals = torch.stack(sums)
    for key in sorted(divided, key=lambda key: key[0]):  # on every rank first those of dense weights
        of_group = torch.tensor(divided[key], device=totals.device)
        values = totals[of_group]
        dist.all_reduce(values, group=key[1])
        totals[of_group] = values
    return [Fingerprint(*key, value) for key, value in zip(keys, totals.tolist(), strict=True)]


def _model_parts(chunks: Sequence[nn.Module], context: MegatronContext) -> Iterator[TensorPart]:
    for shard in named_shards(chunks, context):
        yield _part_of(shard)
    for name, buffer in named_buffers(chunks, context):
        yield TensorPart(name, buffer, tuple(buffer.shape))


def _part_of(shard: WeightShard) -> TensorPart:
    part = TensorPart(shard.name, shard.param.data, shard.full_shape)
    if shard.dim is None:
        return part
    length, limit = shard.param.size(shard.dim), shard.full_shape[shard.dim]
    spans = spans_of(length, shard.pieces, shard.group.size(), shard.group.rank(), limit)
    return part._replace(dim=shard.dim, spans=spans, group=shard.group, expert=shard.expert)


def _sum_of(part: TensorPart, dtype: torch.dtype, keys: IndexKeys) -> Tensor:
    """The sum over a part's elements: int64, without dims, on its device."""
    tensor = part.tensor.detach()
    if part.dim is None:
        whole = tensor.reshape(part.shape)
        return sum_of_bits(whole if part.shape else whole.reshape(1), [0] * max(len(part.shape), 1), dtype, keys)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start, stop, offset in part.spans:
        first = [start if dim == part.dim else 0 for dim in range(len(part.shape))]
        total += sum_of_bits(tensor.narrow(part.dim, offset, stop - start), first, dtype, keys)
    return total


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
