"""Explanation of a call without running it: the rows and bytes of each rank, and the ranks that return."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mcontroller.data.batch import DataProto, format_bytes
from mcontroller.dispatch.call import PreparedCall, SentBatch
from mcontroller.dispatch.modes import Plan
from mcontroller.locality import locality_lines
from mcontroller.transport import Arguments, Deferred
from parallel_state.describe import runs_text
from parallel_state.topology import Topology

SHOWN_RANKS = 64
TITLES = ("rank", "coordinates", "node", "shard", "rows", "bytes", "returns")

UNKNOWN_SIZE = "columns on workers"


@dataclass(frozen=True)
class RankExplanation:
    """One rank's part in a call.

    Attributes:
        rank: the rank.
        coordinates: its index on each axis.
        node: its node; None if unknown.
        shard: the shard that it gets.
        rows: indices of its rows in the caller's batch; None if rows are not split.
        padding: how many of the rows, the last ones, are padding.
        bytes: size of its arguments, without values that are still on the workers.
        returns: whether its value is returned.
        unknown_bytes: whether it also fetches values that are kept elsewhere, of unknown size.
    """

    rank: int
    coordinates: Mapping[str, int]
    node: str | None
    shard: int
    rows: Sequence[int] | None
    padding: int
    bytes: int
    returns: bool
    unknown_bytes: bool = False


@dataclass(frozen=True, repr=False)
class Explanation:
    """What a call would send to and collect from each rank. ``str`` and ``repr`` are a table.

    Axes that cross nodes, although their collectives run in every layer, follow the table.

    Attributes:
        method: role and name of the method.
        mode: name of the dispatch mode.
        plan: the plan of the call.
        ranks: the part of each rank.
        sent_bytes: size of the arguments that all ranks read, without values that are still on the workers.
        stored_bytes: size of the arguments that the transport stores: each shard, and each argument that is not split,
            once.
    """

    method: str
    mode: str
    plan: Plan
    ranks: tuple[RankExplanation, ...]
    sent_bytes: int
    stored_bytes: int

    def __str__(self) -> str:
        axes = _axes_with_several_ranks(self.plan.topology)
        rows = [TITLES, *(_cells(rank, axes) for rank in self.ranks[:SHOWN_RANKS])]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        if len(self.ranks) > SHOWN_RANKS:
            table.append(f"... and {len(self.ranks) - SHOWN_RANKS} more ranks")
        unknown = any(rank.unknown_bytes for rank in self.ranks)
        sent, stored = _size_text(self.sent_bytes, unknown), _size_text(self.stored_bytes, False)
        tail = f"{sent} read by all ranks, {stored} stored"
        if unknown:
            tail += "; the size of columns on workers is not known in the controller"
        crossing = locality_lines(self.plan.topology)
        head = f"{self.method} ({self.mode}): {len(self.ranks)} ranks, {self.plan.shard_count} shards"
        head += f", {len(self.plan.collected)} return as {self.plan.spec.result}"
        return "\n".join([head, *table, tail, *crossing])

    __repr__ = __str__


def explain(call: PreparedCall) -> Explanation:
    """Return the explanation of a call that has its arguments."""
    plan = call.plan
    sizes = {id(arguments): payload_bytes(arguments) for arguments in call.shards}
    origin = call.origin
    returning = set(plan.collected)
    nodes = plan.topology.nodes
    ranks = tuple(
        RankExplanation(
            rank=rank,
            coordinates=plan.topology.coordinates(rank),
            node=nodes[rank] if nodes else None,
            shard=shard,
            rows=None if origin is None else origin.shards[shard],
            padding=0 if origin is None else origin.pads[shard],
            bytes=sizes[id(call.shards[shard])],
            returns=rank in returning,
            unknown_bytes=_has_deferred(call.shards[shard]),
        )
        for rank, shard in zip(plan.ranks, plan.shards, strict=True)
    )
    sent, stored = sum(rank.bytes for rank in ranks), sum(sizes.values())
    if origin is not None:  # arguments that are not split are the same for all shards
        values = {id(value): value for shard in call.shards for value in (*shard.args, *shard.kwargs.values())}
        stored = sum(map(payload_bytes, values.values()))
    return Explanation(f"{call.group.name}.{call.method}", plan.spec.name, plan, ranks, sent, stored)


def payload_bytes(value: Any) -> int:
    """Return the approximate size of a value when it is sent; 0 for a value that is still on the workers."""
    if isinstance(value, SentBatch):
        return payload_bytes(value.sent)
    if isinstance(value, Deferred):
        return 0
    if isinstance(value, DataProto):
        return value.nbytes() + payload_bytes(value.meta_info)
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.nbytes
    if isinstance(value, Arguments):
        return payload_bytes([*value.args, *value.kwargs.values()])
    if isinstance(value, Mapping):
        return sum(map(payload_bytes, value.keys())) + sum(map(payload_bytes, value.values()))
    if isinstance(value, list | tuple | set):
        return sum(map(payload_bytes, value))
    return sys.getsizeof(value)


def _has_deferred(arguments: Arguments) -> bool:
    return any(isinstance(value, Deferred) for value in (*arguments.args, *arguments.kwargs.values()))


def _size_text(size: int, unknown: bool) -> str:
    if not unknown:
        return format_bytes(size)
    return f"{format_bytes(size)} + {UNKNOWN_SIZE}" if size else UNKNOWN_SIZE


def _axes_with_several_ranks(topology: Topology) -> list[str]:
    """Return the axes on which ranks differ; expert axes only if there are several groups of experts."""
    experts = topology.expert_axes if topology.sizes.get("ep", 1) > 1 else ()
    return [axis for axis in dict.fromkeys((*topology.dense_axes, *experts)) if topology.sizes[axis] > 1]


def _cells(rank: RankExplanation, axes: Sequence[str]) -> tuple[str, ...]:
    coordinates = " ".join(f"{axis}={rank.coordinates[axis]}" for axis in axes)
    returns = "yes" if rank.returns else ""
    size = _size_text(rank.bytes, rank.unknown_bytes)
    return str(rank.rank), coordinates, rank.node or "", str(rank.shard), _rows_text(rank), size, returns


def _rows_text(rank: RankExplanation) -> str:
    """Return ``0-3``, or the first rows and the last one, and how many of them are padding."""
    if not rank.rows:
        return "-" if rank.rows is None else "none"
    padding = f", {rank.padding} padding" if rank.padding else ""
    return f"{runs_text(rank.rows)} ({len(rank.rows)} rows{padding})"
