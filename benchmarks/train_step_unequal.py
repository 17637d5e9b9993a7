"""Rows of unequal length: the output layer over the targets that count, compared with all target columns.

``benchmarks/train_step.py`` prints its table. One process with one thread scores and trains the same rows in both ways,
alternately; "all columns" is what the output layer computes if it does not know the mask.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn

from benchmarks.train_step_plain import OPTIM
from mcontroller import DataProto
from workers import ActorConfig, ActorRolloutRefWorker, ModelConfig, RolloutConfig
from workers.train.batches import TokenBatch

__all__ = ["compare_targets"]

ROWS, MICRO_BATCH = 16, 8
PROMPT, RESPONSE = 256, 256  # the longest; a response has an eighth of it in the mean
TOLERANCE = 1e-5


class EveryColumn(ActorRolloutRefWorker):
    """Runs the output layer over all target columns, as it did before it knew the mask."""

    def forward_step(self, model: nn.Module, rows: TokenBatch) -> Tensor:
        predictors = rows.predictors.minimum(rows.lengths[:, None] - 1)
        everything = dataclasses.replace(rows, mask=torch.ones_like(rows.mask), predictors=predictors)
        return super().forward_step(model, dataclasses.replace(rows, own=everything.for_rank(1, 0).own))


class Side(NamedTuple):
    """A worker, and the rows that went through its output layer so far."""

    worker: Any
    seen: list[int]


def batch_of(model: ModelConfig, generator: torch.Generator) -> DataProto:
    """Return prompts of 16 to PROMPT tokens, and responses with a geometric distribution."""
    prompts = torch.randint(16, PROMPT + 1, (ROWS, 1), generator=generator)
    stops = torch.empty(ROWS, 1).geometric_(8 / RESPONSE, generator=generator)
    mask = (torch.arange(RESPONSE) < stops).long()
    attention = torch.cat(((torch.arange(PROMPT) >= PROMPT - prompts).long(), mask), 1)
    ids = torch.randint(2, model.vocab_size, attention.shape, generator=generator) * attention
    columns = {
        "input_ids": ids,
        "attention_mask": attention,
        "responses": ids[:, PROMPT:],
        "response_mask": mask,
        "old_log_probs": torch.full(mask.shape, -9.0) * mask,
        "advantages": torch.randn(mask.shape, generator=generator) * mask,
    }
    return DataProto.from_dict(columns)


def side(worker_class: type[ActorRolloutRefWorker], model: ModelConfig, packed: bool) -> Side:
    config = ActorConfig(
        model=model,
        optim=OPTIM,
        rollout=RolloutConfig(prompt_length=PROMPT, response_length=RESPONSE),
        ppo_mini_batch_size=ROWS,
        ppo_micro_batch_size=MICRO_BATCH,
        packed=packed,
        share_prompts=False,
    )
    worker = worker_class(config, "actor")
    with worker.call_context("init_model"):
        worker.init_model()
    seen: list[int] = []
    head = worker.model[0].module.output_layer
    head.register_forward_pre_hook(lambda layer, args: seen.append(args[0].shape[:-1].numel()))
    return Side(worker, seen)


def seconds_of(side: Side, method: str, batch: DataProto) -> tuple[float, DataProto]:
    side.seen.clear()
    with side.worker.call_context(method):
        began = time.perf_counter()
        result = getattr(side.worker, method)(batch)
        return time.perf_counter() - began, result


def compare_targets(model: ModelConfig, rounds: int) -> Table:
    """Score and train in both ways alternately; the first round warms up and is not measured."""
    table = Table(title="Rows of unequal length: the output layer", title_justify="left")
    heads = ("", "targets", "rows, all columns", "rows, ours", "per target", "s, all columns", "s, ours", "ratio")
    for head in heads:
        table.add_column(head, justify="right" if head else "left", no_wrap=not head)
    model = dataclasses.replace(model, max_sequence_length=PROMPT + RESPONSE)
    for packed in (False, True):
        sides = [side(worker_class, model, packed) for worker_class in (EveryColumn, ActorRolloutRefWorker)]
        for method in ("compute_log_prob", "update_actor"):
            generator = torch.Generator().manual_seed(1)
            taken: list[list[float]] = [[], []]
            for number in range(rounds + 1):
                batch = batch_of(model, generator)
                results = []
                for which in ((0, 1), (1, 0))[number % 2]:
                    seconds, result = seconds_of(sides[which], method, batch)
                    taken[which].append(seconds)
                    results.append(result)
                check_equal(*results)
            counted = int(batch.batch["response_mask"].sum())
            before, after = (sum(each.seen) for each in sides)
            medians = [statistics.median(seconds[1:]) for seconds in taken]
            table.add_row(
                f"{method}, {'packed' if packed else 'padded'}",
                f"{counted:,}",
                f"{before:,}",
                f"{after:,}",
                f"{before / counted:.1f}x, {after / counted:.2f}x",
                f"{medians[0]:.3f}",
                f"{medians[1]:.3f}",
                f"{medians[1] / medians[0]:.2f}x",
            )
    return table


def check_equal(one: DataProto, other: DataProto) -> None:
    """Exit if the two ways compute different log-probabilities or metrics."""
    if one.batch is not None and len(one):
        columns = dict(one.batch)
        differences = [float((columns[name] - other.batch[name]).abs().max()) for name in columns]
    else:
        metrics = one.meta_info["metrics"]
        differences = [abs(metrics[name] - other.meta_info["metrics"][name]) for name in metrics]
    if max(differences) > TOLERANCE:
        raise SystemExit(f"the two ways differ by {max(differences):.1e}, more than {TOLERANCE:.0e}")
