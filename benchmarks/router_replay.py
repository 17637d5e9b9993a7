"""The mismatch between rollout and training of a mixture of experts, with and without the experts of the rollout.

    python benchmarks/router_replay.py [--steps 4] [--seeds 0 1]

GRPO with ``RayPPOTrainer`` on simulated ranks in this process: a policy of random weights, 16 experts of which 2
compute each token. "mean", "max" and "KL" are ``training/rollout_probs_diff_mean``, ``_max`` and
``training/rollout_kl`` of the trainer: mean, largest and mean over all steps and seeds. "other experts" are the choices
of a pass of whole sequences that differ from the rollout's, of all tokens and layers, before the first step. The second
table has what an update of four optimizer steps sees: the largest ratio of the policy's probability to the old one
(median of the steps), the tokens whose ratio is clipped, and ``ppo_kl`` (mean of its absolute value).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mcontroller import DataProto
from mcontroller.ray import ResourcePoolManager
from mcontroller.testing import simulated_worker_group
from trainer import AlgorithmConfig, Callback, DataConfig, PPOConfig, RayPPOTrainer, Role, TrainerConfig
from trainer.rewards.reward import Reward, outcome_scores
from workers import ActorRolloutRefWorker
from workers.config import ActorConfig, load_config

PROMPT, RESPONSE, PROBLEMS, SAMPLES, VOCAB = 16, 48, 8, 8, 256
MODEL = {
    "vocab_size": VOCAB,
    "max_sequence_length": PROMPT + RESPONSE,
    "num_layers": 6,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "init_method_std": 0.08,
    "num_moe_experts": 16,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 128,
    "transformer": {"moe_router_load_balancing_type": "none"},
}
CASES = (("bfloat16", "float32"), ("bfloat16", "bfloat16"))
"""Dtypes of the rollout and of training."""


class Tokenizer:
    eos_token_id = 1
    pad_token_id = 0


class FirstBatch(Callback):
    """Keeps the first batch of a run."""

    batch: DataProto | None = None

    def batch_ready(self, trainer: Any, batch: DataProto) -> None:
        self.batch = batch if self.batch is None else self.batch


def even_tokens(batch: DataProto) -> Reward:
    mask = batch.batch["response_mask"]
    return Reward(outcome_scores(((batch.batch["responses"] % 2 == 0) * mask).sum(1) / mask.sum(1), mask))


def actor_config(dtype: str, mode: str, seed: int, steps_of_update: int) -> ActorConfig:
    rollout = {"prompt_length": PROMPT, "response_length": RESPONSE, "seed": seed, "n": SAMPLES}
    sizes = {"ppo_mini_batch_size": PROBLEMS * SAMPLES // steps_of_update, "ppo_micro_batch_size": 16}
    model = MODEL | {"dtype": dtype, "seed": 1234 + seed}
    optim = {"lr": 1e-4, "warmup_steps": 0}
    return load_config(
        ActorConfig, {"model": model, "optim": optim, "rollout": rollout, "router_replay": mode, **sizes}
    )


def make_group(pool: Any, init: Any, name_prefix: str) -> Any:
    return simulated_worker_group(init, 1, name=name_prefix)


def trainer_of(
    dtypes: tuple[str, str], mode: str, seed: int, steps_of_update: int, callbacks: Sequence[Callback] = ()
) -> RayPPOTrainer:
    """Return a trainer with separate groups for actor and rollout, which may have other dtypes."""
    roles = {Role.Actor: ActorRolloutRefWorker, Role.Rollout: ActorRolloutRefWorker}
    config = PPOConfig(
        actor_rollout_ref=actor_config(dtypes[1], mode, seed, steps_of_update),
        rollout=actor_config(dtypes[0], mode if mode == "rollout" else "none", seed, steps_of_update),
        data=DataConfig(train_batch_size=PROBLEMS),
        algorithm=AlgorithmConfig(adv_estimator="grpo", old_log_probs="policy"),
        trainer=TrainerConfig(total_training_steps=1, save_freq=-1),
    )
    names = {role: role.name for role in roles}
    ids = torch.randint(2, VOCAB, (8 * PROBLEMS, PROMPT), generator=torch.Generator().manual_seed(seed))
    return RayPPOTrainer(
        config,
        Tokenizer(),
        roles,
        ResourcePoolManager({name: [1] for name in names.values()}, names, use_gpu=False, threads=1),
        make_group,
        reward_fn=even_tokens,
        train_dataset=[{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids],
        callbacks=callbacks,
    )


def steps_of(
    dtypes: tuple[str, str], mode: str, seed: int, count: int, steps_of_update: int, callbacks: Sequence[Callback] = ()
) -> list[dict[str, float]]:
    """Return the metrics of some steps."""
    with trainer_of(dtypes, mode, seed, steps_of_update, callbacks) as trainer:
        trainer.init_workers()
        return [trainer.train_step(trainer.draw()) for _ in range(count)]


def other_experts(dtypes: tuple[str, str], seed: int, batch: DataProto) -> float:
    """Return the share of the choices of a batch that a pass with the weights before the first step makes otherwise."""
    init = {"config": actor_config(dtypes[1], "old_log_probs", seed, 1), "role": "actor"}
    with simulated_worker_group(ActorRolloutRefWorker, 1, **init) as group:
        group.init_model()
        own = group.compute_log_prob(batch).batch["routed_experts"].sort(-1).values
    recorded = batch.batch["routed_experts"].sort(-1).values
    known = recorded[..., 0] != -1
    return float((recorded != own).any(-1)[known].float().mean())


def summary(metrics: list[dict[str, float]]) -> list[str]:
    mean, largest, kl = (
        [each[f"training/{name}"] for each in metrics]
        for name in ("rollout_probs_diff_mean", "rollout_probs_diff_max", "rollout_kl")
    )
    return [f"{statistics.mean(mean):.5f}", f"{max(largest):.4f}", f"{statistics.mean(kl):.5f}"]


def mismatch_table(steps: int, seeds: Sequence[int]) -> Table:
    table = Table("rollout", "training", "router_replay", "mean", "max", "KL", "other experts")
    for dtypes in CASES:
        first = {seed: FirstBatch() for seed in seeds}
        plain = [each for seed in seeds for each in steps_of(dtypes, "none", seed, steps, 1)]
        replayed = [each for seed in seeds for each in steps_of(dtypes, "rollout", seed, steps, 1, [first[seed]])]
        shares = [other_experts(dtypes, seed, kept.batch) for seed, kept in first.items() if kept.batch is not None]
        table.add_row(*dtypes, "none", *summary(plain), f"{statistics.mean(shares):.1%}")
        table.add_row(*dtypes, "rollout", *summary(replayed), "as recorded")
    return table


def update_table(steps: int, seeds: Sequence[int]) -> Table:
    table = Table("router_replay", "largest ratio", "clipped", "KL of update")
    for mode in ("none", "old_log_probs"):
        metrics = [each for seed in seeds for each in steps_of(("float32", "float32"), mode, seed, steps, 4)]
        of = {name: [each[f"actor/{name}"] for each in metrics] for name in ("ratio_max", "pg_clipfrac", "ppo_kl")}
        clipped, kl = statistics.mean(of["pg_clipfrac"]), statistics.mean(map(abs, of["ppo_kl"]))
        table.add_row(mode, f"{statistics.median(of['ratio_max']):.3f}", f"{clipped:.3%}", f"{kl:.5f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=120, highlight=False)
    console.print(mismatch_table(options.steps, options.seeds))
    console.print(update_table(options.steps, options.seeds))


if __name__ == "__main__":
    main()
