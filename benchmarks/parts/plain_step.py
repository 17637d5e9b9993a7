"""A step of Megatron's schedule without this project's trainer: what the project's updates are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

MicroBatch = dict[str, Any]
"""``input_ids``, ``position_ids``, ``labels`` and ``loss_mask``; of packed rows ``packed_seq_params`` too."""


def plain_step(model: Any, optimizer: Any, micro_batches: Sequence[MicroBatch]) -> tuple[list[dict[str, Tensor]], Any]:
    """Make one optimizer step with the cross entropy of the labels, and return the reports and the gradient norm.

    Args:
        model: the chunk of this rank, wrapped for data parallelism.
        optimizer: of the model.
        micro_batches: of one shape.
    """
    # Megatron's own, which divides by the tokens that count: the trainer of this project does that itself.
    get_model_config(model).finalize_model_grads_func = finalize_model_grads
    model.zero_grad_buffer()
    optimizer.zero_grad()
    rows, length = micro_batches[0]["input_ids"].shape
    reports = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=iter(micro_batches),
        model=model,
        num_microbatches=len(micro_batches),
        seq_length=length,
        micro_batch_size=rows,
        forward_only=False,
    )
    _, norm, _ = optimizer.step()
    return reports, norm


def _forward_step(micro_batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
    inputs = dict(next(micro_batches))
    mask = inputs.pop("loss_mask")
    return model(attention_mask=None, **inputs), partial(_loss, mask)


def _loss(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the cross entropy summed over the tokens that count, their number, and both to report."""
    total, count = (losses.float() * mask).sum(), mask.sum()
    return total, count.int(), {"loss": torch.stack((total.detach(), count))}
