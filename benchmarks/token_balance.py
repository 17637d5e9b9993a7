"""Tokens of the slowest data-parallel rank over the mean, with and without ``trainer.balance_tokens``.

    python benchmarks/token_balance.py [--prompts 128] [--responses 8] [--ranks 8] [--steps 20]

The lengths of responses have a long tail: log-normal with a median of 600 tokens and sigma 1, cut at 16,384, as
reasoning models produce them. Prompts have 50 to 400 tokens. An optimizer step waits for its slowest rank, so each
mini-batch counts by itself. Only row numbers are computed, by the functions that the trainer calls; no model runs.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from mcontroller.partition import Partition, split_rows
from workers.train.mini_batches import draw_mini_batches

LIMIT = 1.05
"""Of the slowest rank over the mean, balanced, with 32 or more rows of a mini-batch on each rank."""


def slowest(partition: Partition, tokens: list[int], steps: torch.Tensor, ranks: int) -> float:
    """Return the mean over the mini-batches of the most tokens of a rank divided by the mean of all ranks."""
    owner = {row: shard for shard in range(ranks) for row in partition.rows(shard)}
    found = []
    for step in range(int(steps.max()) + 1):
        sums = [0] * ranks
        for row in (steps == step).nonzero().flatten().tolist():
            sums[owner[row]] += tokens[row]
        found.append(max(sums) / (sum(sums) / ranks))
    return statistics.mean(found)


def ratios(prompts: int, responses: int, ranks: int, mini_batches: int, seed: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(seed)
    rows = prompts * responses
    lengths = torch.empty(rows).log_normal_(mean=6.4, std=1.0, generator=generator).long().clamp(1, 16_384)
    lengths += torch.randint(50, 400, (prompts, 1), generator=generator).expand(prompts, responses).reshape(-1)
    tokens, of_prompt = lengths.tolist(), [row // responses for row in range(rows)]
    steps = draw_mini_batches(rows, rows // mini_batches, 1, generator)[:, 0]
    split = {
        "in order": split_rows(rows, ranks),
        "balanced": split_rows(rows, ranks, lengths=tokens, within=steps.tolist()),
        "prompts together": split_rows(rows, ranks, lengths=tokens, groups=of_prompt, within=steps.tolist()),
    }
    return {name: slowest(partition, tokens, steps, ranks) for name, partition in split.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("prompts", 128), ("responses", 8), ("ranks", 8), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    rows = given.prompts * given.responses
    print(f"tokens of the slowest of {given.ranks} ranks over the mean, {rows} rows, {given.steps} batches")
    for mini_batches in (1, 2, 4):
        found = [ratios(given.prompts, given.responses, given.ranks, mini_batches, seed) for seed in range(given.steps)]
        means = {name: statistics.mean(each[name] for each in found) for name in found[0]}
        listed = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
        large = rows // mini_batches // given.ranks >= 32
        verdict = f" (limit {LIMIT} {'met' if means['balanced'] <= LIMIT else 'MISSED'})" if large else ""
        print(f"  {mini_batches} mini-batches: {listed}{verdict}")


if __name__ == "__main__":
    main()
