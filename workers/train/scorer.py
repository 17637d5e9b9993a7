"""Score rows: run them through a model without gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from workers.config.roles import MicroBatchSize
from workers.train.batches import TokenBatch
from workers.train.forward import sum_over_context
from workers.train.micro_batches import MicroBatcher
from workers.train.pipeline import Forward, run_for_scores
from workers.train.state import TrainingState


class Scorer:
    """Runs rows through the models of a worker.

    Args:
        state: the models.
        batcher: divides rows into micro-batches.
        forward: ``ModelWorker.forward_step``.
    """

    def __init__(self, state: TrainingState, batcher: MicroBatcher, forward: Forward) -> None:
        self._state, self._batcher, self._forward = state, batcher, forward

    def score(
        self, model: Sequence[nn.Module], rows: TokenBatch, size: MicroBatchSize, forward: Forward | None = None
    ) -> Tensor | None:
        """Return the outputs of ``forward_step`` for all rows, in their order, on the last stage; None elsewhere.

        Args:
            model: this rank's chunks.
            rows: this rank's shard.
            size: of micro-batches.
            forward: instead of ``forward_step``.

        Returns:
            ``[..., rows, targets]`` on the CPU, summed over context-parallel ranks.
        """
        self._state.check_context()
        batcher, pg = self._batcher, self._batcher.pg
        most = max(batcher.gather(len(rows)))
        batches = batcher.divide(rows, torch.arange(len(rows)), most, size)
        on_device = batcher.on_device(model, (divided.batch for divided in batches))
        outputs = run_for_scores(model, on_device, forward or self._forward, pg)
        if not outputs:
            return None
        scored = [output.narrow(-2, 0, len(batch.index)) for output, batch in zip(outputs, batches, strict=True)]
        order = torch.cat([batch.index for batch in batches]).argsort().to(batcher.device)
        joined = torch.cat(scored, dim=-2).index_select(-2, order)
        return sum_over_context(joined, pg).cpu()
