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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

import parallel_state.cpu

parallel_state.cpu.install()  # before Megatron is imported

from torch import Tensor  # noqa: E402

from benchmarks.parts.plain_step import plain_step  # noqa: E402
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
            self.optimizer = make_optimizer(self.model, OPTIM, self.context.pg)
            self.scheduler = make_scheduler(self.optimizer, OPTIM)

    def step(self, batch: dict[str, Tensor]) -> tuple[float, float]:
        """Make one optimizer step; return its loss (0 except on the last stage) and gradient norm."""
        group = self.context.pg.dp
        ids, mask = (batch[name].chunk(group.size())[group.rank()] for name in ("input_ids", "loss_mask"))
        counted = mask.roll(-1, 1).float()
        counted[:, -1] = 0.0
        columns = {
            "input_ids": ids,
            "position_ids": torch.arange(ids.size(1)).expand_as(ids),
            "labels": ids.roll(-1, 1),
            "loss_mask": counted,
        }
        parts = zip(*(column.split(MICRO_BATCH) for column in columns.values()), strict=True)
        reports, norm = plain_step(
            self.model[0], self.optimizer, [dict(zip(columns, part, strict=True)) for part in parts]
        )
        self.scheduler.step(1)
        if not reports:
            return 0.0, float(norm)
        total = torch.stack([report["loss"] for report in reports]).sum(0)
        dist.all_reduce(total, group=group)
        return float(total[0] / total[1]), float(norm)


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
