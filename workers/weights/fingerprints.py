"""Fingerprints of weights: one number per tensor that is the same in every layout, compared after every update.

The fingerprint of a tensor is the sum, modulo 2**64, of the bits of every element times a key of each of its indices in
the tensor of the whole model. Each rank adds up its own part, and whoever compares adds the sums of different parts. So
no rank needs the whole tensor, and two layouts of the same weights have the same fingerprints, on a CPU and on a GPU.
Keys are odd, so every change of one element changes it, as do two exchanged elements, rows or columns. It is a check
against errors, not against an attacker. Zeros of both signs, and numbers of float32 and bfloat16 below 1.2e-38, count
as 0: an engine's kernels may compute with them as 0.

A tolerance on log-probabilities cannot show that weights have arrived. One update in bfloat16 at a learning rate of
1e-6 changes them by less than engine and policy differ anyway. Fingerprints are equal or not.
"""

from __future__ import annotations

import logging
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcontroller.errors import MControllerError
from workers.weights.in_engine.bit_sums import IndexKeys, sum_of_bits
from workers.weights.same_tensors import some_of
from workers.weights.shards import WeightShard, whole_shard

logger = logging.getLogger(__name__)


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


def dtypes_by_name(by_rank: Iterable[Iterable[Any]]) -> dict[str, list[str]]:
    """Return by name the dtypes in which ranks have the tensor, of descriptions with a ``name`` and a ``dtype``."""
    dtypes: dict[str, set[str]] = defaultdict(set)
    for tensor in chain.from_iterable(by_rank):
        dtypes[tensor.name].add(tensor.dtype)
    return {name: sorted(names) for name, names in dtypes.items()}


class WeightsNotArrived(MControllerError):
    """After an update, the receiver does not hold the weights of the policy; it gets them again before it generates.

    Attributes:
        update: the number of the update, ``weights_version`` of the worker; the version of the policy if the weights
            were sent from another group.
        tensors: by name, the fingerprints of the policy and of the receiver; several if copies differ.
        old: names of the ``tensors`` of which the receiver holds the values of the update before.
        missing: names of tensors of the policy that no rank of the receiver holds.
        unknown: names of tensors that the receiver holds and the policy does not have.
        ranks: ranks of the receiver that hold a value of ``tensors`` that is not the policy's.
    """

    update: int
    tensors: dict[str, tuple[list[int], list[int]]]
    old: list[str]
    missing: list[str]
    unknown: list[str]
    ranks: list[int]


class Verification:
    """Compares a receiver with the policy after every update, and remembers the values of the update before.

    Args:
        receiver: what weights are sent to, for errors.
    """

    def __init__(self, receiver: str) -> None:
        self._receiver = receiver
        self._before: dict[tuple[str, str], set[int]] = {}

    def check(self, policy: Sequence[Sequence[Fingerprint]], held: Sequence[Sequence[Fingerprint]], update: int) -> int:
        """Raise unless the receiver holds the weights of the policy, and return a number of these in any layout.

        Args:
            policy: by rank of the policy, the fingerprints of its parts in the dtypes of the receiver.
            held: by rank of the receiver, the fingerprints of what it holds.
            update: the number of the update.

        Raises:
            WeightsNotArrived: with the ranks and the tensors.
        """
        expected, held_values = whole_fingerprints(policy), whole_fingerprints(held)
        tensors: dict[str, tuple[list[int], list[int]]] = {}
        old, ranks = set[str](), set[int]()
        for key in expected.keys() & held_values.keys():
            right, values = expected[key].keys(), held_values[key].keys()
            if not values <= right:
                tensors[key[0]] = sorted(right), sorted(values)
                ranks |= {rank for value in values - right for rank in held_values[key][value]}
                if values <= right | self._before.get(key, set()):
                    old.add(key[0])
            elif len(right) > 1:
                logger.warning("update %d: ranks of the policy hold different values of %s", update, key[0])
        missing = sorted({name for name, _ in expected.keys() - held_values.keys()})
        unknown = sorted({name for name, _ in held_values.keys() - expected.keys()})
        if tensors or missing or unknown:
            differing = {
                f"values from before the update in {len(old)} of {len(expected)} tensors": sorted(old),
                "other values than the policy in": sorted(tensors.keys() - old),
                "nothing under the names": missing,
                "tensors that the policy does not have:": unknown,
            }
            held_text = "; ".join(f"{what} {some_of(names)}" for what, names in differing.items() if names)
            on = f" (ranks {some_of(sorted(ranks), 16)})" if ranks else ""
            raise WeightsNotArrived(
                f"update {update} of the weights did not arrive in {self._receiver}{on}, which has {held_text}",
                update=update,
                tensors=dict(sorted(tensors.items())),
                old=sorted(old),
                missing=missing,
                unknown=unknown,
                ranks=sorted(ranks),
            )
        self._before = {key: set(values) for key, values in expected.items()}
        return zlib.crc32(repr(sorted((key, sorted(values)) for key, values in expected.items())).encode())
