"""Measure ``compute_advantage`` for every estimator on a large batch, on the controller's CPU.

python benchmarks/advantages.py [--rows 1024] [--response 8192] [--threads 2]
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

import trainer.loop  # noqa: F401  registers all estimators
from mcontroller import DataProto
from trainer import compute_advantage
from trainer.estimators.registry import ADVANTAGE_ESTIMATORS

LIMIT_SECONDS = 0.25
RESPONSES_PER_PROMPT = 8


def scored_batch(rows: int, response: int) -> DataProto:
    """Return a batch of random lengths with a reward at the end of every response, and all that an estimator reads."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, response + 1, (rows,), generator=generator)
    rewards = torch.zeros(rows, response)
    rewards[torch.arange(rows), lengths - 1] = torch.randint(0, 2, (rows,), generator=generator).float()
    tensors = {
        "response_mask": (torch.arange(response) < lengths[:, None]).long(),
        "token_level_rewards": rewards,
        "token_level_scores": rewards,
        "values": torch.randn(rows, response, generator=generator),
        "old_log_probs": torch.randn(rows, response, generator=generator),
        "ref_log_prob": torch.randn(rows, response, generator=generator),
        "greedy_scores": torch.rand(rows, generator=generator),
    }
    prompts = np.arange(rows // RESPONSES_PER_PROMPT).repeat(RESPONSES_PER_PROMPT).astype(object)
    return DataProto.from_dict(tensors, non_tensors={"uid": prompts})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024, help=f"a multiple of {RESPONSES_PER_PROMPT}")
    parser.add_argument("--response", type=int, default=8192, help="tokens of the longest response")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=5, help="runs of each; the median is shown")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    batch = scored_batch(given.rows, given.response)
    megabytes = sum(column.nbytes for column in batch.tensors().values()) / 2**20
    print(f"[{given.rows}, {given.response}], {megabytes:.0f} MB of columns, {given.threads} threads")
    print(f"{'estimator':34s} {'time':>10s} {'limit':>10s}")
    for name in ADVANTAGE_ESTIMATORS:
        seconds = []
        for _ in range(given.repeat):
            started = time.perf_counter()
            compute_advantage(batch, name, gamma=1.0, lam=0.95)
            seconds.append(time.perf_counter() - started)
        print(f"{name:34s} {statistics.median(seconds):8.3f} s {LIMIT_SECONDS:8.2f} s")


if __name__ == "__main__":
    main()
