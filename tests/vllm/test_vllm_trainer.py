"""GRPO with ``RayPPOTrainer`` and vLLM: colocated, in a separate group, one step off policy, and after a failure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mcontroller import MegatronRayWorkerGroup
from mcontroller.data.batch import DataProto
from mcontroller.ray import ResourcePoolManager
from tests.e2e.test_one_step_off_policy import exported, log_probs_of
from tests.vllm.policies import EOS, PAD, POLICIES, Actor, actor_config, prompts
from tests.workers.off_policy.runs import Lines, evenness
from trainer import (
    AlgorithmConfig,
    Callback,
    DataConfig,
    ImportanceConfig,
    PPOConfig,
    RayPPOTrainer,
    Role,
    TrainerConfig,
)
from workers import ActorConfig

PROBLEMS, SAMPLES, STEPS, TOLERANCE = 4, 4, 3, 1e-4
SEPARATE = {Role.Actor: Actor, Role.Rollout: Actor}
TOGETHER = {Role.ActorRollout: Actor}


class Tokens:
    eos_token_id = EOS
    pad_token_id = PAD


class Recorded(Callback):
    """The policies before the updates, and the batches that are trained on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.policies: list[Any] = []
        self.batches: list[DataProto] = []

    def batch_ready(self, trainer: Any, batch: DataProto) -> None:
        self.policies.append(exported(trainer, self.folder / str(len(self.policies))))
        self.batches.append(batch.get())  # to be read after the workers have ended


def config_of(policy: str, parallel: Mapping[str, int], engine: str, **rollout: Any) -> ActorConfig:
    settings = {"engine": engine, "n": SAMPLES, "response_length": 8, **rollout}
    return actor_config(
        policy,
        parallel=dict(parallel),
        optim={"lr": 1e-2, "eps": 1e-8, "weight_decay": 0.0, "warmup_steps": 0},
        rollout=settings,
        ppo_mini_batch_size=PROBLEMS * SAMPLES,
        ppo_epochs=1,
    )


@contextmanager
def trainer_of(
    policy: str,
    roles: Mapping[Role, Any],
    staleness: int = 0,
    callbacks: tuple[Callback, ...] = (),
    trackers: tuple[Any, ...] = (),
    saving: Mapping[str, Any] | None = None,
    **rollout: Any,
) -> Iterator[RayPPOTrainer]:
    """A trainer with TP2 or EP2 ranks of the actor; the rollout is a third rank, unless it is the actor's."""
    separate = Role.Rollout in roles
    parallel = POLICIES[policy]["parallel"]
    engine_of_actor, settings = ("megatron", {}) if separate else ("vllm", rollout)
    config = PPOConfig(
        actor_rollout_ref=config_of(policy, parallel, engine_of_actor, **settings),
        rollout=config_of(policy, {"tp": 1, "ep": 1}, "vllm", **rollout) if separate else None,
        data=DataConfig(train_batch_size=PROBLEMS),
        algorithm=AlgorithmConfig(
            adv_estimator="grpo", old_log_probs="policy", importance=ImportanceConfig(level="token")
        ),
        trainer=TrainerConfig(
            total_training_steps=STEPS, save_freq=-1, test_freq=-1, max_staleness=staleness, **saving or {}
        ),
    )
    sizes = {role.name: [1 if role is Role.Rollout else 2] for role in roles}
    asked = prompts(4 * PROBLEMS).batch
    trainer = RayPPOTrainer(
        config,
        Tokens(),
        dict(roles),
        ResourcePoolManager(sizes, {role: role.name for role in roles}, use_gpu=False, threads=1),
        MegatronRayWorkerGroup,
        reward_fn=evenness,
        train_dataset=[{name: asked[name][row] for name in asked.keys()} for row in range(4 * PROBLEMS)],  # noqa: SIM118
        trackers=trackers,
        callbacks=callbacks,
    )
    with trainer:
        trainer.init_workers()
        yield trainer


@pytest.mark.parametrize(
    ("policy", "roles", "staleness"),
    [
        ("dense-tp2", TOGETHER, 0),
        ("dense-tp2", SEPARATE, 0),
        ("tied-tp2", SEPARATE, 1),
        ("moe-ep2", SEPARATE, 1),
    ],
    ids=["colocated", "separate", "separate-one-step-off-tied", "separate-one-step-off-moe"],
)
def test_every_batch_is_from_the_policy_of_its_version(
    ray_cluster: None, tmp_path: Path, policy: str, roles: Mapping[Role, Any], staleness: int
) -> None:
    """Log-probabilities of the engine equal transformers' for the exported policy of that version."""
    recorded, lines = Recorded(tmp_path), Lines()
    with trainer_of(policy, roles, staleness, (recorded,), (lines,)) as trainer:
        trainer.fit()
    worst = []
    for step, batch in enumerate(recorded.batches):
        version = max(step - staleness, 0)
        assert set(batch.batch["policy_version"].tolist()) == {version}
        mask = batch.batch["response_mask"]
        with torch.no_grad():
            expected, newest = (log_probs_of(recorded.policies[each], batch) for each in (version, step))
        worst.append(((batch.batch["rollout_log_probs"] - expected) * mask).abs().max().item())
        if version < step:
            assert ((newest - expected) * mask).abs().max() > 100 * TOLERANCE  # another policy would be noticed
        metrics = lines.steps[step + 1]
        assert metrics.get("training/staleness_mean", 0.0) == step - version
        assert (metrics["training/rollout_probs_diff_max"] < TOLERANCE) == (version == step)
    print(policy, "largest differences by step:", " ".join(f"{each:.1e}" for each in worst))  # noqa: T201
    assert len(worst) == STEPS and max(worst) < TOLERANCE


def test_a_run_restarts_an_engine_that_was_killed_without_the_actor(ray_cluster: None, tmp_path: Path) -> None:
    """While it generates for the second step, and before the weights of the third one move."""
    recorded, lines = Recorded(tmp_path), Lines()
    saving = {"memory_save_freq": 1, "default_local_dir": str(tmp_path)}
    with trainer_of("dense-tp2", SEPARATE, 0, (recorded,), (lines,), saving) as trainer:
        processes, update = trainer.actor.pid(), trainer.step.weights.update

        def killed(*args: Any, **options: Any) -> Any:
            strikes = len(trainer.recovery.failures) < trainer.global_steps
            if strikes and trainer.global_steps == 2:
                trainer.rollout.signal_engine("SIGKILL")
            updated = update(*args, **options)
            if strikes and trainer.global_steps == 1:
                trainer.rollout.signal_engine("SIGKILL")
            return updated

        trainer.step.weights.update = killed
        trainer.fit()
        failures = [(failure.kind, failure.role, failure.step) for failure in trainer.recovery.failures]
        assert failures == [("EngineDied", "rollout", 2), ("EngineDied", "rollout", 3)]
        assert trainer.actor.pid() == processes
    assert len(recorded.batches) == STEPS
    assert all(lines.steps[step]["training/rollout_probs_diff_max"] < TOLERANCE for step in (1, 2, 3))
