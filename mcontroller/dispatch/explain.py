"""What a call would do, told without doing it: who would get which rows, how many bytes, and who would return."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mcontroller.data.protocol import DataProto
from mcontroller.dispatch.prepared_call import PreparedCall
from mcontroller.dispatch.modes import Plan
from mcontroller.partition import Partition
from mcontroller.transport import Arguments, Deferred
from parallel_state.topology import Topology

__all__ = ["Explanation", "RankExplanation", "explain", "payload_bytes"]

SHOWN_RANKS = 64


@dataclass(frozen=True)
class RankExplanation:
    """One rank's part: ``rows`` of the caller's batch, the last ``padding`` of them repeated; None without a split."""

    rank: int
    coordinates: Mapping[str, int]
    node: str | None
    shard: int
    rows: Sequence[int] | None
    padding: int
    bytes: int
    returns: bool


@dataclass(frozen=True, repr=False)
class Explanation:
    """A call as it would be made; shown, or printed, it is a table.

    ``sent_bytes`` counts what all ranks read, ``stored_bytes`` what is stored for it: each shard once.
    """

    method: str
    mode: str
    plan: Plan
    ranks: tuple[RankExplanation, ...]
    sent_bytes: int
    stored_bytes: int

    def __str__(self) -> str:
        shown = self.ranks[:SHOWN_RANKS]
        axes = _telling_axes(self.plan.topology)
        table = [("rank", "coordinates", "node", "shard", "rows", "bytes", "returns")]
        table += [_cells(rank, axes) for rank in shown]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        if len(shown) < len(self.ranks):
            lines.append(f"... and {len(self.ranks) - len(shown)} more ranks")
        returning = len(self.plan.collected)
        head = f"{self.method} ({self.mode}): {len(self.ranks)} ranks, {self.plan.shard_count} shards"
        tail = f"{readable(self.sent_bytes)} read by all ranks, {readable(self.stored_bytes)} stored"
        return "\n".join([f"{head}, {returning} return as {self.plan.spec.result}", *lines, tail])

    __repr__ = __str__


def explain(call: PreparedCall) -> Explanation:
    """The explanation of a call from what it would send."""
    plan, call = dispatched.plan, dispatched.call
    sizes = {id(arguments): payload_bytes(arguments) for arguments in dispatched.shards}
    origin = dispatched.origin if isinstance(dispatched.origin, Partition) else None
    returning = set(plan.collected)
    nodes = plan.topology.nodes
    ranks = tuple(
        RankExplanation(
            rank=rank,
            coordinates=plan.topology.coordinates(rank),
            node=nodes[rank] if nodes else None,
            shard=shard,
            rows=None if origin is None else origin.rows(shard),
            padding=0 if origin is None else origin.pads[shard],
            bytes=sizes[id(dispatched.shards[shard])],
            returns=rank in returning,
        )
        for rank, shard in zip(plan.ranks, plan.shards, strict=True)
    )
    sent, stored = sum(rank.bytes for rank in ranks), sum(sizes.values())
    return Explanation(f"{call.group.name}.{call.method}", plan.spec.name, plan, ranks, sent, stored)


def payload_bytes(value: Any) -> int:
    """About how many bytes a value takes on its way; what is still on the workers takes none of the controller's."""
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


def readable(size: float) -> str:
    """A number of bytes for people: ``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _telling_axes(topology: Topology) -> list[str]:
    """The axes on which ranks differ; those of the expert grid only where there are experts to tell apart."""
    experts = topology.expert_axes if topology.sizes.get("ep", 1) > 1 else ()
    return [axis for axis in dict.fromkeys((*topology.dense_axes, *experts)) if topology.sizes[axis] > 1]


def _cells(rank: RankExplanation, axes: Sequence[str]) -> tuple[str, str, str, str, str, str, str]:
    place = " ".join(f"{axis}={rank.coordinates[axis]}" for axis in axes)
    returns = "yes" if rank.returns else ""
    shard = str(rank.shard)
    return str(rank.rank), place, rank.node or "", shard, _rows_text(rank), readable(rank.bytes), returns


def _rows_text(rank: RankExplanation) -> str:
    """``0..3``, or the rows one by one, and how many of them are padding."""
    if rank.rows is None:
        return "-"
    rows = list(rank.rows)
    if not rows:
        return "none"
    run = len(rows) > 2 and rows == list(range(rows[0], rows[0] + len(rows)))
    listed = ",".join(map(str, rows[:6])) + (",..." if len(rows) > 6 else "")
    text = f"{rows[0]}..{rows[-1]}" if run else listed
    return f"{text} ({len(rows)} rows{f', {rank.padding} padding' if rank.padding else ''})"
