"""Copy weights from one layout's model to another's in the same processes, without a whole model on any rank.

Every rank reports the parts of tensors that it has (``workers.weights.shards``). From these reports all ranks make the
same plan (``workers.weights.refit_plan``), and the slices travel in all-to-all exchanges of bounded size. No rank
receives what it has.

``megatron.core.resharding`` does this for dense models. It is not used, because in megatron-core 0.16 it moves only the
first chunk of a source with virtual stages, fails on tied embeddings between PP1 and PP2, and returns wrong weights
without an error for experts that are not grouped and for gated units under expert tensor parallelism. Here all of these
are one case. A tensor whose position in the whole model is unknown is rejected with an error that names it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_state.megatron import MegatronContext
from workers.weights.local_tensors import described_tensors, padding_rows
from workers.weights.refit_plan import Move, RefitPlan, check_known, plan_refit

__all__ = ["Refit", "RefitReport"]


@dataclass(frozen=True)
class RefitReport:
    """What one refit cost, the same on every rank.

    Attributes:
        bytes_sent: bytes sent from one rank to another, over all ranks, counted when they were sent.
        least_bytes: bytes that ranks need in the target's layout and do not have in the source's, over all ranks.
        most_sent_by_a_rank: the part of ``bytes_sent`` that the busiest rank sent.
        exchanges: number of all-to-all exchanges.
        seconds: wall-clock time of the slowest rank.
    """

    bytes_sent: int
    least_bytes: int
    most_sent_by_a_rank: int
    exchanges: int
    seconds: float


class Refit:
    """Copies of the weights of one layout's model to another's: planned once, run whenever the source has changed.

    Building one and running it are collective over all ranks of torch.distributed. For the way back, build a ``Refit``
    with the arguments exchanged; a target that is trained must then copy the weights into its optimizer
    (``optimizer.reload_model_params()``). If dtypes differ, ``copy_`` converts to the target's.

    Args:
        source_chunks: this rank's model chunks in the layout that weights come from, wrapped or not.
        source_context: that layout.
        target_chunks: this rank's chunks in the layout that weights go to. Parameters and persistent buffers are
            copied.
        target_context: that layout.
        bucket_bytes: most bytes that a rank sends, and most that it receives, at once. A refit needs at most twice
            that memory.

    Raises:
        DataError: on every rank, with the names: the two are not the same model, or the position of a weight in the
            whole model is unknown.
    """

    def __init__(
        self,
        source_chunks: Sequence[nn.Module],
        source_context: MegatronContext,
        target_chunks: Sequence[nn.Module],
        target_context: MegatronContext,
        *,
        bucket_bytes: int = 64 << 20,
    ) -> None:
        self._sources, sources, unknown = described_tensors(source_chunks, source_context)
        self._targets, targets, unknown_too = described_tensors(target_chunks, target_context)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (sources, targets, unknown + unknown_too))
        all_sources, all_targets, all_unknown = zip(*everyone, strict=True)
        check_known(sorted({name for names in all_unknown for name in names}))
        self.plan: RefitPlan = plan_refit(all_sources, all_targets, bucket_bytes)
        self._padding = list(padding_rows(target_chunks, target_context))

    @torch.no_grad()
    def run(self) -> RefitReport:
        """Copy the current weights of the source to the target (a collective)."""
        torch.cuda.synchronize()  # the device may still run what was called before
        start = time.perf_counter()
        rank = dist.get_rank()
        for move in self.plan.copies:
            if move.target_rank == rank:
                self._target(move).copy_(self._source(move))
        for rows in self._padding:
            rows.zero_()
        sent = sum(self._exchange(bucket, rank) for bucket in self.plan.buckets)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (sent, seconds))
        return RefitReport(
            bytes_sent=sum(bytes_sent for bytes_sent, _ in everyone),
            least_bytes=self.plan.least_bytes,
            most_sent_by_a_rank=max(bytes_sent for bytes_sent, _ in everyone),
            exchanges=len(self.plan.buckets),
            seconds=max(duration for _, duration in everyone),
        )

    def _exchange(self, bucket: Sequence[Move], rank: int) -> int:
        """Exchange the moves of one bucket, and return the bytes that this rank sent."""
        # Sorted by the other rank, and for each rank in the order of the plan: the same order on both sides.
        outbound = sorted((move for move in bucket if move.source_rank == rank), key=lambda move: move.target_rank)
        inbound = sorted((move for move in bucket if move.target_rank == rank), key=lambda move: move.source_rank)
        dtype, itemsize = getattr(torch, bucket[0].dtype), getattr(torch, bucket[0].dtype).itemsize
        out_sizes, in_sizes = ([0] * dist.get_world_size() for _ in range(2))
        for move in outbound:
            out_sizes[move.target_rank] += move.nbytes // itemsize
        for move in inbound:
            in_sizes[move.source_rank] += move.nbytes // itemsize
        device = torch.cuda.current_device()
        outgoing = torch.empty(sum(out_sizes), dtype=dtype, device=device)
        incoming = torch.empty(sum(in_sizes), dtype=dtype, device=device)
        for move, part in zip(outbound, outgoing.split([move.nbytes // itemsize for move in outbound]), strict=True):
            source = self._source(move)
            part.view(source.shape).copy_(source)
        dist.all_to_all_single(incoming, outgoing, in_sizes, out_sizes)
        for move, part in zip(inbound, incoming.split([move.nbytes // itemsize for move in inbound]), strict=True):
            target = self._target(move)
            target.copy_(part.view(target.shape))
        return outgoing.nbytes

    def _source(self, move: Move) -> Tensor:
        return self._sources[move.source_slot].data.narrow(move.dim, move.source_start, move.length)

    def _target(self, move: Move) -> Tensor:
        return self._targets[move.target_slot].data.narrow(move.dim, move.target_start, move.length)
