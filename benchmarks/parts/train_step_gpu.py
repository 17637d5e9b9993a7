"""A supervised update of a model of 1.7B parameters on one GPU, beside a plain Megatron loop over the same model.

    python benchmarks/parts/train_step_gpu.py

Two such models do not fit beside each other, so one process has one model, which both sides train with a learning rate
of 0, on the same rows. If their losses or gradient norms differ, no figure is printed. It needs no Ray.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from mcontroller.devices import torch_without_gpu

if not torch.cuda.is_available():
    raise SystemExit(str(torch_without_gpu()))

from megatron.core.packed_seq_params import PackedSeqParams

from benchmarks.parts.plain_step import MicroBatch, plain_step
from mcontroller import DataProto
from workers.config import ActorConfig
from workers.gpucheck.scale import FULL, batch_of, fastest
from workers.parity.roles import call, policy

AT_MOST, LEAST_UTILIZATION = 1.02, 0.45
TOLERANCE = 1e-2
"""The largest relative difference of losses and of gradient norms: both sides round to bfloat16."""


def compare(config: ActorConfig) -> dict[str, float]:
    """Return the seconds of an update and of a plain step, their ratio, and the share of the GPU's peak."""
    batch = sft_batch(config)
    with policy(dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=0.0))) as worker:
        call(worker, "update_sft", batch)
        seconds, updated = fastest(call, worker, "update_sft", batch)
        metrics = updated.meta_info["metrics"]
        with worker.call_context("update_sft"):
            step = worker.model[0], worker.state.optimizer, packed(batch, config.ppo_micro_batch_size, worker.device)
            plain_step(*step)
            plain, (reports, norm) = fastest(plain_step, *step)
    total, count = torch.stack([report["loss"] for report in reports]).sum(0).tolist()
    for name, expected in {"loss": total / count, "grad_norm": float(norm)}.items():
        if not abs(metrics[f"sft/{name}"] / expected - 1) <= TOLERANCE:
            raise SystemExit(f"the sides do not train the same: {name} {metrics[f'sft/{name}']} and {expected}")
    tokens_per_s = batch.tensors()["input_ids"].numel() / seconds
    figures = {"seconds": seconds, "plain_s": plain, "of_plain": seconds / plain, "tokens_per_s": tokens_per_s}
    return figures | {name: value for name, value in metrics.items() if name == "sft/mfu"}


def sft_batch(config: ActorConfig) -> DataProto:
    """Return rows of full length; every token but the first is a target."""
    ids = batch_of(config).tensors()["input_ids"]
    targets = (torch.arange(ids.size(1)) > 0).long().expand_as(ids).contiguous()
    return DataProto.from_dict({"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": targets})


def packed(batch: DataProto, count: int, device: torch.device) -> Sequence[MicroBatch]:
    """Return micro-batches of ``count`` rows in one sequence, ``[1, count * seq]``."""
    ids = batch.tensors()["input_ids"].to(device)
    length = ids.size(1)
    counted = torch.ones_like(ids, dtype=torch.float32)
    counted[:, -1] = 0.0  # its label is the first token of the row
    positions = torch.arange(length, device=device).expand_as(ids)
    columns = {"input_ids": ids, "position_ids": positions, "labels": ids.roll(-1, 1), "loss_mask": counted}
    bounds = torch.arange(count + 1, dtype=torch.int32, device=device) * length
    sequences = PackedSeqParams("thd", bounds, bounds, None, None, length, length)
    return [
        {name: column[first : first + count].reshape(1, -1) for name, column in columns.items()}
        | {"packed_seq_params": sequences}
        for first in range(0, len(ids), count)
    ]


if __name__ == "__main__":
    print(json.dumps(compare(FULL)))
    print(f"limits: of_plain at most {AT_MOST}, sft/mfu at least {LEAST_UTILIZATION}")
