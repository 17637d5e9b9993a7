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


def plain_steps(
    model: list[nn.Module], optimizer: Any, batch: DataProto, device: torch.device, packed: int
) -> Callable[[], None]:
    """Return a function that makes one optimizer step with a clipped policy loss.

    Args:
        model: the chunk of a model on one rank, inside Megatron's DistributedDataParallel.
        optimizer: Megatron's.
        batch: with the columns of an update; all rows have all their tokens.
        device: of the model.
        packed: rows that are computed as one sequence; it divides the rows of the batch.
    """
    columns = {name: column.to(device) for name, column in batch.tensors().items()}
    count, length = columns["input_ids"].shape
    before = length - columns["responses"].size(1) - 1  # the column that predicts the first token of the response
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
        ratio = (-losses.float().view(packed, length)[:, before:-1] - rows["old_log_probs"]).exp()
        gain, clipped = ratio * rows["advantages"], ratio.clamp(0.8, 1.2) * rows["advantages"]
        total = (torch.maximum(-gain, -clipped) * rows["response_mask"]).sum()
        return total, rows["response_mask"].sum().int(), {"loss": total.detach()}

    micro_batches = [
        {name: column[start : start + packed] for name, column in columns.items()} for start in range(0, count, packed)
    ]

    def step() -> None:
        for chunk in model:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        optimizer.zero_grad()
        config = get_model_config(model[0])
        kept, config.finalize_model_grads_func = config.finalize_model_grads_func, finalize_model_grads
        try:
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(micro_batches),
                model=model[0],
                num_microbatches=len(micro_batches),
                seq_length=packed * length,
                micro_batch_size=1,
                forward_only=False,
            )
        finally:
            config.finalize_model_grads_func = kept
        optimizer.step()

    return step
