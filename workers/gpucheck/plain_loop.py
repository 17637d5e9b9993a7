"""A loop over Megatron's schedule without this project's trainer: what an update is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from mcontroller import DataProto


def plain_step(worker: Any, batch: DataProto, packed: int) -> Callable[[], None]:
    """Return a function that makes one optimizer step with a clipped policy loss, on a rank that has the whole model.

    Args:
        worker: an actor with a model that is trained.
        batch: with the columns of an update; all rows have all their tokens.
        packed: rows that are computed as one sequence; it divides the rows of the batch.
    """
    [model], optimizer, device = worker.model, worker.state.optimizer, worker.device
    columns = {name: column.to(device).split(packed) for name, column in batch.tensors().items()}
    micro_batches = [dict(zip(columns, rows, strict=True)) for rows in zip(*columns.values(), strict=True)]
    length = micro_batches[0]["input_ids"].size(1)
    first = length - micro_batches[0]["responses"].size(1)
    bounds = torch.arange(packed + 1, dtype=torch.int32, device=device) * length
    sequences = PackedSeqParams("thd", bounds, bounds, None, None, length, length)
    positions = torch.arange(length, device=device).repeat(packed)[None]

    def forward(micro_batches: Iterator[dict[str, Tensor]], chunk: nn.Module) -> tuple[Tensor, Any]:
        rows = next(micro_batches)
        ids = rows["input_ids"]
        labels = ids.roll(-1, 1).flatten()[None]
        losses = chunk(ids.flatten()[None], positions, None, labels=labels, packed_seq_params=sequences)
        return losses, partial(loss, rows)

    def loss(rows: dict[str, Tensor], losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        log_probs = -losses.float().view(packed, length)[:, first - 1 : -1]
        ratio = (log_probs - rows["old_log_probs"]).exp()
        gain, clipped = ratio * rows["advantages"], ratio.clamp(0.8, 1.2) * rows["advantages"]
        total = (torch.maximum(-gain, -clipped) * rows["response_mask"]).sum()
        return total, rows["response_mask"].sum().int(), {"loss": total.detach()}

    def step() -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(micro_batches),
            model=model,
            num_microbatches=len(micro_batches),
            seq_length=packed * length,
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()

    # Megatron's own, which divides by the tokens that count: the trainer of this project does that itself.
    get_model_config(model).finalize_model_grads_func = finalize_model_grads
    return step
