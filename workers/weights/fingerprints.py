"""Fingerprints of weights: one number per tensor that is the same in every layout.

The fingerprint of a tensor is the sum, modulo 2**64, of the bits of every element times a key of each of its indices in
the tensor of the whole model. Each rank adds up its own part, and whoever compares adds the sums of different parts. So
no rank needs the whole tensor, and two layouts of the same weights have the same fingerprints, on a CPU and on a GPU.
Keys are odd, so every change of one element changes it, as do two exchanged elements, rows or columns. It is a check
against errors, not against an attacker. Zeros of both signs, and numbers of float32 and bfloat16 below 1.2e-38, count
as 0: an engine's kernels may compute with them as 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import starmap
from typing import NamedTuple

import torch
from torch import Tensor

from workers.weights.in_engine.bit_sums import IndexKeys, sum_of_bits
from workers.weights.shards import WeightShard, whole_shard


class Fingerprint(NamedTuple):
    """The fingerprint of a part of a tensor of the whole model.

    Attributes:
        name: the tensor's name. Copies of a tensor (a packed output layer of tied embeddings) have the same name.
        dtype: the name of the dtype whose bits were hashed, such as ``bfloat16``.
        value: a signed 64-bit integer.
        first: the first index of the part in the divided dim; 0 for a whole tensor.
    """

    name: str
    dtype: str
    value: int
    first: int = 0


def tensor_fingerprints(
    tensors: Iterable[tuple[str, Tensor]], dtypes: Mapping[str, Collection[str]] | None = None
) -> list[Fingerprint]:
    """Return the fingerprints of whole tensors, such as an engine's ``named_parameters()``.

    An engine that packs several tensors into one passes the slices, each under the tensor's own name. A copy is passed
    once more, under the name of the tensor that it is a copy of.

    Args:
        tensors: names and tensors, read one at a time.
        dtypes: see ``shard_fingerprints``.
    """
    return shard_fingerprints(starmap(whole_shard, tensors), dtypes)


@torch.no_grad()
def shard_fingerprints(
    shards: Iterable[WeightShard], dtypes: Mapping[str, Collection[str]] | None = None
) -> list[Fingerprint]:
    """Return the fingerprints of this rank's parts. The device is synchronized once.

    Args:
        shards: the parts, read one at a time.
        dtypes: by name, the dtypes that the values are converted to first, as a receiver does; a tensor that is not in
            it, or all if it is None, is taken as it is.
    """
    keys: list[tuple[str, str, int]] = []
    sums: list[Tensor] = []
    of_dims = IndexKeys()
    for shard in shards:
        part, runs = shard.part, list(shard.runs())
        for dtype in sorted((dtypes or {}).get(part.name, ())) or [part.dtype]:
            of_runs = [_sum_of(values, first, part.dim, getattr(torch, dtype), of_dims) for first, values in runs]
            if of_runs:  # padding alone has no fingerprint
                keys.append((part.name, dtype, runs[0][0]))
                sums.append(torch.stack(of_runs).sum())
    values = torch.stack(sums).tolist() if sums else []
    return [Fingerprint(name, dtype, value, first) for (name, dtype, first), value in zip(keys, values, strict=True)]


def _sum_of(values: Tensor, first: int, dim: int | None, dtype: torch.dtype, keys: IndexKeys) -> Tensor:
    tensor = values.detach()
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    return sum_of_bits(tensor, [first if number == dim else 0 for number in range(tensor.dim())], dtype, keys)


def whole_fingerprints(by_rank: Sequence[Sequence[Fingerprint]]) -> dict[tuple[str, str], dict[int, set[int]]]:
    """Return the values of whole tensors by name and dtype, with the ranks that hold a part of each value.

    A tensor has several values if copies of one of its parts differ.

    Args:
        by_rank: by rank, the fingerprints of its parts.
    """
    parts: dict[tuple[str, str], dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for rank, fingerprints in enumerate(by_rank):
        for name, dtype, value, first in fingerprints:
            parts[name, dtype][first].append((value, rank))
    wholes: dict[tuple[str, str], dict[int, set[int]]] = {}
    for key, by_first in parts.items():
        ranks_by_value = wholes[key] = defaultdict(set)
        for copy in range(max(map(len, by_first.values()))):
            held = [copies[min(copy, len(copies) - 1)] for copies in by_first.values()]
            total = sum(value for value, _ in held)
            ranks_by_value[(total + (1 << 63)) % (1 << 64) - (1 << 63)] |= {rank for _, rank in held}
    return wholes
