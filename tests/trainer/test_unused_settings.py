"""A setting that changes nothing, because what reads it is off, is rejected by its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from mcontroller.errors import ConfigError
from tests.trainer.toy import ToyActor, toy_config, toy_trainer
from trainer import (
    AlgorithmConfig,
    AsynchronousConfig,
    DataConfig,
    FilterGroupsConfig,
    GRPOOptions,
    ImportanceConfig,
    KLControlConfig,
    MultiTurnConfig,
    OverlongConfig,
    RewardFunctionConfig,
    RewardsConfig,
    Role,
    TrainerConfig,
    ValidationConfig,
    WarmUpConfig,
)
from trainer.config import ProfileConfig
from trainer.run.config import ClusterConfig, PoolConfig
from workers.config import ActorConfig, ModelConfig, OptimConfig, RolloutConfig, VllmConfig

MODEL = ModelConfig(vocab_size=16, max_sequence_length=1024, num_layers=1, hidden_size=8, num_attention_heads=1)


def of_actor(**settings: Any) -> ActorConfig:
    return ActorConfig(model=MODEL, **settings)


@pytest.mark.parametrize(
    ("make", "settings", "key", "switch"),
    [
        (ImportanceConfig, {"mode": "mask"}, "mode", {"level": "token"}),
        (ImportanceConfig, {"threshold": 3.0}, "threshold", {"level": "sequence"}),
        (ImportanceConfig, {"level": "token", "least": 0.5}, "least", {"mode": "mask"}),
        (ImportanceConfig, {"mode": "mask", "off_policy_mask": 0.1}, "mode", {"level": "token"}),
        (FilterGroupsConfig, {"max_batches": 3}, "max_batches", {"enable": True}),
        (OverlongConfig, {"penalty": 0.5}, "penalty", {"buffer": 4}),
        (OverlongConfig, {"buffer": 4, "penalty": 0.0}, "buffer", {"penalty": 1.0}),
        (MultiTurnConfig, {"timeout_s": 3.0}, "timeout_s", {"episode": "mine:episode"}),
        (KLControlConfig, {"horizon": 3}, "horizon", {"type": "adaptive"}),
        (
            AlgorithmConfig,
            {"kl_penalty": "k3", "adv_estimator": "rloo"},
            "algorithm.kl_penalty",
            {"use_kl_in_reward": True},
        ),
        (
            AlgorithmConfig,
            {"kl_ctrl": KLControlConfig(kl_coef=0.1), "use_kl_in_reward": False},
            "algorithm.kl_ctrl",
            {"use_kl_in_reward": True},
        ),
        (AlgorithmConfig, {"lam": 0.9, "adv_estimator": "grpo"}, "algorithm.lam", {"adv_estimator": "gae"}),
        (AlgorithmConfig, {"gamma": 0.9, "adv_estimator": "rloo"}, "algorithm.gamma", {"use_kl_in_reward": True}),
        (
            AlgorithmConfig,
            {"grpo": GRPOOptions(ddof=1), "adv_estimator": "rloo"},
            "algorithm.grpo",
            {"adv_estimator": "grpo"},
        ),
        (
            RewardsConfig,
            {"timeout_s": 5.0},
            "timeout_s",
            {"functions": {"mine": RewardFunctionConfig("a.py:b")}},
        ),
        (ValidationConfig, {"temperature": 0.5}, "temperature", {"do_sample": True}),
        (WarmUpConfig, {"batch_size": 5}, "batch_size", {"steps": 1}),
        (AsynchronousConfig, {"seed": 5}, "seed", {"schedule": "simulated"}),
        (ProfileConfig, {"nsys": True}, "nsys", {"steps": (1,)}),
        (
            TrainerConfig,
            {"asynchronous": AsynchronousConfig(stale="drop")},
            "asynchronous",
            {"max_staleness": 2},
        ),
        (TrainerConfig, {"save_minutes": 5.0, "save_freq": 5}, "save_minutes", {"save_freq": 0}),
        (TrainerConfig, {"memory_save_freq": 5, "max_restarts": 0}, "memory_save_freq", {"max_restarts": 1}),
        (TrainerConfig, {"restart_on": ("ValueError",), "max_restarts": 0}, "restart_on", {"max_restarts": 1}),
        (TrainerConfig, {"ref_sync_mix": 0.5}, "ref_sync_mix", {"ref_sync_steps": 1}),
        (TrainerConfig, {"patience_factor": 5.0}, "patience_factor", {"patience": 1.0}),
        (
            TrainerConfig,
            {"offload_communicators": True, "offload": "never"},
            "offload_communicators",
            {"offload": "auto"},
        ),
        (OptimConfig, {"min_lr": 1e-6}, "min_lr", {"decay_style": "linear", "total_steps": 5}),
        (OptimConfig, {"wsd_decay_steps": 2}, "wsd_decay_steps", {"decay_style": "WSD", "total_steps": 5}),
        (RolloutConfig, {"top_p": 0.5, "do_sample": False}, "top_p", {"do_sample": True}),
        (RolloutConfig, {"vllm": VllmConfig(tp=2)}, "vllm", {"engine": "vllm"}),
        (PoolConfig, {"isolate_gpus": True}, "isolate_gpus", {"use_gpu": True}),
        (ClusterConfig, {"address": "auto", "num_cpus": 4}, "num_cpus", {"address": None}),
        (
            of_actor,
            {"ppo_mini_batch_prompts": 4, "ppo_mini_batch_size": 64},
            "ppo_mini_batch_size",
            {"ppo_mini_batch_prompts": 0},
        ),
        (of_actor, {"policy_loss": "gpg", "clip_ratio": 0.1}, "actor_rollout_ref.clip_ratio", {"policy_loss": "ppo"}),
        (
            of_actor,
            {"policy_loss": "cispo", "clip_ratio_c": 3.0},
            "actor_rollout_ref.clip_ratio_c",
            {"policy_loss": "ppo"},
        ),
        (
            of_actor,
            {"use_kl_loss": False, "kl_loss_coef": 0.1},
            "kl_loss_coef",
            {"use_kl_loss": True},
        ),
    ],
)
def test_a_setting_without_effect_is_rejected_until_it_has_one(
    make: Callable[..., Any], settings: dict[str, Any], key: str, switch: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**settings)
    assert caught.value.key == key
    make(**{**settings, **switch})


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"validation": ValidationConfig(response_length=1)}, "validation"),
        ({"data": DataConfig(train_batch_size=48, val_batch_size=4)}, "data.val_batch_size"),
    ],
)
def test_a_setting_of_validation_is_rejected_without_held_out_problems(section: dict[str, Any], key: str) -> None:
    config = dataclasses.replace(toy_config(1), **section)
    toy_trainer(config)
    with pytest.raises(ConfigError) as caught:
        toy_trainer(config, val_dataset=None)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"critic_warmup": 2}, "trainer.critic_warmup"),
        ({"weight_timeout": 60.0}, "trainer.weight_timeout"),
    ],
)
def test_a_setting_of_a_role_that_does_not_exist_is_rejected(options: dict[str, Any], key: str) -> None:
    config = dataclasses.replace(toy_config(1, **options), algorithm=AlgorithmConfig(adv_estimator="remax"))
    with pytest.raises(ConfigError) as caught:
        toy_trainer(config, {Role.ActorRolloutRef: ToyActor})
    assert caught.value.key == key
