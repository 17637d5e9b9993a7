"""A plain training loop with Megatron for torchrun, with which ``benchmarks/train_step.py`` compares the controller.

It imports neither Ray nor the controller. The model, the batches and the settings of both sides are defined here.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import parallel_state.cpu

parallel_state.cpu.install()  # before Megatron is imported

from megatron.core.distributed import finalize_model_grads  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.utils import get_model_config  # noqa: E402
from torch import Tensor  # noqa: E402

from parallel_state import ParallelLayout  # noqa: E402
from parallel_state.megatron import MegatronContext, initialize_distributed  # noqa: E402
from workers.config import ModelConfig, OptimConfig, ParallelConfig  # noqa: E402
from workers.model.build import build_model  # noqa: E402
from workers.train.optimizer import make_optimizer, make_scheduler, wrap_for_training  # noqa: E402

WORLD_SIZE = 8
PARALLEL = ParallelConfig(tp=2, pp=2)
OPTIM = OptimConfig(lr=1e-3, eps=1e-4)
ROWS, MICRO_BATCH = 8, 1  # rows per step over all ranks, and per forward pass
WAIT = datetime.timedelta(hours=2)


def model_of(hidden: int, layers: int, sequence: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=8192,
        max_sequence_length=sequence,
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=8,
        ffn_hidden_size=4 * hidden,
    )


def batch_of(step: int, model: ModelConfig) -> dict[str, Tensor]:
    """Return the rows ``[ROWS, seq]`` of one step; every token but the first is a target."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, model.vocab_size, (ROWS, model.max_sequence_length), generator=generator)
    targets = (torch.arange(ids.size(1)) > 0).long().repeat(ROWS, 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": targets}


class PlainLoop:
    """The model, optimizer and schedule of this rank."""

    def __init__(self, model: ModelConfig) -> None:
        self.config = model
        self.context = MegatronContext(ParallelLayout(WORLD_SIZE, tp=PARALLEL.tp, pp=PARALLEL.pp), model.seed)
        with self.context.activate():
            self.model = wrap_for_training(build_model(model, PARALLEL, self.context), OPTIM, self.context.pg)
            # Megatron's own, which divides by the tokens that count: the trainer of this project does that itself
            get_model_config(self.model[0]).finalize_model_grads_func = finalize_model_grads
            self.optimizer = make_optimizer(self.model, OPTIM, self.context.pg)
            self.scheduler = make_scheduler(self.optimizer, OPTIM)

    def step(self, batch: dict[str, Tensor]) -> tuple[float, float]:
        """Make one optimizer step; return its loss (0 except on the last stage) and gradient norm."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        group = self.context.pg.dp
        mine = {name: column.chunk(group.size())[group.rank()] for name, column in batch.items()}
        columns = zip(*(column.split(MICRO_BATCH) for column in mine.values()), strict=True)
        micro_batches = [dict(zip(mine, rows, strict=True)) for rows in columns]
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=self.model[0],
            num_microbatches=len(micro_batches),
            seq_length=self.config.max_sequence_length,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        made, norm, _ = self.optimizer.step()
        assert made
        self.scheduler.step(1)
        if not reports:
            return 0.0, float(norm)
        total = torch.stack([report["loss"] for report in reports]).sum(0)
        dist.all_reduce(total, group=group)
        return float(total[0] / total[1]), float(norm)


def forward_step(batches: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    rows = next(batches)
    ids, mask = rows["input_ids"], rows["loss_mask"]
    labels = ids.roll(-1, 1)
    counted = mask.roll(-1, 1).float()
    counted[:, -1] = 0.0
    positions = torch.arange(ids.size(1)).expand_as(ids)
    return model(ids, positions, None, labels=labels), partial(loss, counted)


def loss(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the cross entropy summed over the valid tokens, their number, and both to report."""
    total, count = (losses.float() * mask).sum(), mask.sum()
    return total, count.int(), {"loss": torch.stack((total.detach(), count))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("port", "hidden", "layers", "sequence"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    initialize_distributed()
    rank = dist.get_rank()
    assert not {"ray", "tensordict"} & set(sys.modules), (
        "libraries of the controller would count in the memory of the plain loop"
    )
    store = dist.TCPStore("127.0.0.1", options.port, is_master=False, timeout=WAIT)
    store.set(f"ready/{rank}", str(os.getpid()))
    store.get("build")  # sleeps until the key is set, as below
    loop = PlainLoop(model_of(options.hidden, options.layers, options.sequence))
    store.set(f"built/{rank}", "")
    number = 0
    while steps := json.loads(store.get(f"round/{number}")):
        batches = [batch_of(step, loop.config) for step in steps]
        with loop.context.activate():
            dist.barrier()
            began = time.perf_counter()
            made = [loop.step(batch) for batch in batches]
            dist.barrier()
        store.set(f"made/{number}/{rank}", json.dumps((time.perf_counter() - began, made)))
        number += 1


if __name__ == "__main__":
    main()
