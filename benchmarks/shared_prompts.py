"""Training and scoring with each prompt computed once, compared with whole rows (``share_prompts``).

    python benchmarks/shared_prompts.py [--rounds 5] [--threads 1]

One process; both ways score and train the same rows alternately. Times are CPU seconds, which other programs on the
machine disturb less than the clock. The difference is the largest of the log-probabilities.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mcontroller import DataProto
from workers import ActorConfig, ActorRolloutRefWorker, ModelConfig, OptimConfig, RolloutConfig

CASES = (
    ("8 samples, 8 + 16 tokens", 8, 16, 32, 8),
    ("8 samples, 256 + 64", 256, 64, 2, 8),
    ("8 samples, 64 + 256", 64, 256, 2, 8),
    ("one sample, up to 256 + 256", 256, 256, 8, 1),
)
"""Name, longest prompt and response, prompts, samples of each prompt."""


def model_of(width: int) -> ModelConfig:
    return ModelConfig(
        num_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        num_query_groups=4,
        ffn_hidden_size=512,
        vocab_size=1000,
        max_sequence_length=width,
    )


def batch_of(prompt: int, response: int, prompts: int, samples: int) -> DataProto:
    """Return rows of equal lengths, or with one sample of random ones."""
    generator = torch.Generator().manual_seed(1)
    rows = prompts * samples
    ids = torch.randint(2, 1000, (rows, prompt + response), generator=generator)
    ids[:, :prompt] = ids[::samples, :prompt].repeat_interleave(samples, 0)
    attention = torch.ones_like(ids)
    if samples == 1:
        before = torch.randint(16, prompt + 1, (rows, 1), generator=generator)
        after = torch.randint(1, response + 1, (rows, 1), generator=generator)
        columns = torch.arange(prompt + response)
        attention = ((columns >= prompt - before) & (columns < prompt + after)).long()
    mask = attention[:, prompt:]
    return DataProto.from_dict(
        {
            "input_ids": ids * attention,
            "attention_mask": attention,
            "responses": (ids * attention)[:, prompt:],
            "response_mask": mask,
            "old_log_probs": torch.full(mask.shape, -7.0) * mask,
            "advantages": torch.randn(mask.shape, generator=generator) * mask,
        }
    )


def worker_of(prompt: int, response: int, rows: int, share_prompts: bool) -> Any:
    config = ActorConfig(
        model=model_of(prompt + response),
        optim=OptimConfig(lr=1e-5),
        rollout=RolloutConfig(prompt_length=prompt, response_length=response),
        ppo_mini_batch_size=rows,
        ppo_micro_batch_size=rows,
        share_prompts=share_prompts,
    )
    worker = ActorRolloutRefWorker(config, "actor")
    with worker.call_context("init_model"):
        worker.init_model()
    worker.tokens = []
    worker.model[0].module.embedding.register_forward_pre_hook(
        lambda module, args, kwargs: worker.tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    return worker


def compared(case: tuple[str, int, int, int, int], rounds: int) -> list[str]:
    """Return the row of a case."""
    name, prompt, response, prompts, samples = case
    batch = batch_of(prompt, response, prompts, samples)
    sides = [worker_of(prompt, response, len(batch), share_prompts) for share_prompts in (False, True)]
    scores: list[torch.Tensor] = [torch.empty(0)] * 2
    seconds: dict[tuple[str, int], list[float]] = {}
    for number in range(rounds + 1):
        for which in ((0, 1), (1, 0))[number % 2]:
            for method in ("compute_log_prob", "update_actor"):
                with sides[which].call_context(method):
                    began = time.process_time()
                    result = getattr(sides[which], method)(batch)
                    taken = time.process_time() - began
                if number:  # the first round warms up
                    seconds.setdefault((method, which), []).append(taken)
                elif method == "compute_log_prob":
                    scores[which] = result.batch["old_log_probs"]
    row = [name, f"{sides[0].tokens[-1]:,}", f"{sides[1].tokens[-1]:,}"]
    for method in ("compute_log_prob", "update_actor"):
        whole, shared = (statistics.median(seconds[method, which]) for which in (0, 1))
        row.append(f"{whole:.3f} -> {shared:.3f}: {shared / whole:.2f}x")
    return [*row, f"{float((scores[0] - scores[1]).abs().max()):.1e}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each side, after one to warm up")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    table = Table(
        "", "tokens, whole rows", "tokens, ours", "CPU s, compute_log_prob", "CPU s, update_actor", "difference"
    )
    for case in CASES:
        table.add_row(*compared(case, options.rounds))
    Console(width=140, highlight=False).print(table)


if __name__ == "__main__":
    main()
