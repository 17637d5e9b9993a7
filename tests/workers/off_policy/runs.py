"""Runs of real actors and rollouts in separate groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mcontroller.data.batch import DataProto
from mcontroller.ray import ResourcePoolManager
from tests.workers.roles import EOS, MODEL, PAD, PROMPT, RESPONSE, prompts
from trainer import (
    AlgorithmConfig,
    Callback,
    DataConfig,
    ImportanceConfig,
    PPOConfig,
    RayPPOTrainer,
    Reward,
    Role,
    TrainerConfig,
)
from trainer.rewards.reward import outcome_scores
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, load_config

PROBLEMS, SAMPLES, THRESHOLD = 6, 4, 1.05
SGD = {"optimizer": "sgd", "lr": 1.0, "clip_grad": 0.0, "weight_decay": 0.0}


class Tokens:
    eos_token_id = EOS
    pad_token_id = PAD


class Lines:
    """A tracker that records metrics by step, without the machine's."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    def log(self, metrics: Mapping[str, float], step: int, phase: str) -> None:
        kept = {name: value for name, value in metrics.items() if not _of_machine(name)}
        self.steps.setdefault(step, {}).update(kept)

    def log_samples(self, samples: Any, step: int) -> None:
        pass

    def close(self) -> None:
        pass


def _of_machine(name: str) -> bool:
    return name.split("/")[0] in ("timing_s", "perf", "memory") or "seconds" in name or "mfu" in name


def evenness(batch: DataProto) -> Reward:
    """The share of even tokens."""
    mask = batch.batch["response_mask"]
    even = ((batch.batch["responses"] % 2 == 0) * mask).sum(1) / mask.sum(1)
    return Reward(outcome_scores(even.float(), mask))


def trainer_of(
    group_cls: Callable[..., Any],
    staleness: int,
    steps: int,
    parallel: Mapping[str, int],
    *,
    roles: Mapping[Role, Any] | None = None,
    optim: Mapping[str, Any] = SGD,
    bundles: int = 1,
    trackers: Sequence[Any] = (),
    callbacks: Sequence[Callback] = (),
    settings: Mapping[str, Any] | None = None,
    of_rollout: Mapping[str, Any] | None = None,
    **trainer: Any,
) -> RayPPOTrainer:
    """Return a trainer of GRPO with truncated importance sampling, with a pool each for actor and rollout.

    ``settings`` are other fields of both, ``of_rollout`` of the rollout alone.
    """
    rollout = {"prompt_length": PROMPT, "response_length": RESPONSE, "n": SAMPLES, "seed": 3}
    rows = PROBLEMS * SAMPLES
    common = {"model": MODEL, "rollout": rollout, "ppo_mini_batch_size": rows, "ppo_micro_batch_size": 8}
    mapping = dict(roles or {Role.Actor: ActorRolloutRefWorker, Role.Rollout: ActorRolloutRefWorker})
    separate = Role.Rollout in mapping
    config = PPOConfig(
        actor_rollout_ref=load_config(
            ActorConfig, {**common, "optim": dict(optim), "parallel": dict(parallel)}, dict(settings or {})
        ),
        rollout=load_config(ActorConfig, common, dict(settings or {}), dict(of_rollout or {})) if separate else None,
        data=DataConfig(train_batch_size=PROBLEMS),
        algorithm=AlgorithmConfig(
            adv_estimator="grpo", importance=ImportanceConfig(level="token", threshold=THRESHOLD)
        ),
        trainer=TrainerConfig(
            total_training_steps=steps, **{"save_freq": -1, "test_freq": -1, "max_staleness": staleness, **trainer}
        ),
    )
    names = {role: role.name for role in mapping}
    sizes = {name: [1 if role is Role.Rollout else bundles] for role, name in names.items()}
    problems = prompts(4 * PROBLEMS, {}).batch
    return RayPPOTrainer(
        config,
        Tokens(),
        mapping,
        ResourcePoolManager(sizes, names, use_gpu=False, threads=1),
        group_cls,
        reward_fn=evenness,
        train_dataset=[{name: column[row] for name, column in problems.items()} for row in range(4 * PROBLEMS)],
        trackers=trackers,
        callbacks=callbacks,
    )
