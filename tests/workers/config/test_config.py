"""Configurations of the workers: fields, names, and the arguments of a role's constructor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from mcontroller import RayClassWithInitArgs
from mcontroller.errors import ConfigError
from trainer import POLICY_LOSSES, PolicyLoss, register_kl_estimator, register_policy_loss
from trainer.run.parts import policy_loss_line
from workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker
from workers.config import (
    ActorConfig,
    CriticConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    load_config,
)

GPT = ModelConfig(vocab_size=100, max_sequence_length=64, num_layers=4, hidden_size=48, num_attention_heads=12)
ROLLOUT = RolloutConfig(prompt_length=8, response_length=8)
ACTOR = ActorConfig(GPT, rollout=ROLLOUT)


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: ParallelConfig(tp=2, dp=2), "dp"),
        (lambda: ParallelConfig(tensor_model_parallel_size=2), "tensor_model_parallel_size"),
        (lambda: ActorConfig(GPT, lr=1), "lr"),
        (lambda: ActorConfig(GPT, rollout=ROLLOUT, policy_loss="pppo"), "policy_loss"),
        (lambda: ActorConfig(GPT, rollout=ROLLOUT, kl_loss_type="k4"), "kl_loss_type"),
        (lambda: ActorConfig(GPT, rollout=ROLLOUT, kl_loss_type="k1"), "kl_loss_type"),
        (lambda: CriticConfig({"vocab_size": 3}), "model"),
    ],
)
def test_wrong_fields_and_names_are_rejected_with_their_key(make: Callable[[], Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.key == key


def test_registered_names_are_accepted() -> None:
    @register_kl_estimator("custom_for_this_test")
    def kl(log_ratio: Any) -> Any:
        return log_ratio.square()

    @register_policy_loss("custom_for_this_test")
    def loss(log_probs: Any, old_log_probs: Any, advantages: Any, mask: Any, **clip: Any) -> PolicyLoss:
        raise NotImplementedError

    config = ActorConfig(GPT, rollout=ROLLOUT, policy_loss="custom_for_this_test", kl_loss_type="custom_for_this_test")
    assert POLICY_LOSSES[config.policy_loss].function is loss


@pytest.mark.parametrize(
    ("fields", "limits"),
    [
        ({"policy_loss": "ppo"}, (0.2, 0.2)),
        ({"policy_loss": "gspo"}, (3e-4, 4e-4)),
        ({"policy_loss": "gmpo"}, (0.4, 0.4)),
        ({"policy_loss": "cispo"}, (1.0, 0.2)),
        ({"policy_loss": "gspo", "clip_ratio": 0.2}, (0.2, 0.2)),
        ({"policy_loss": "gspo", "clip_ratio_high": 1e-3}, (3e-4, 1e-3)),
        ({"policy_loss": "cispo", "clip_ratio": 0.3, "clip_ratio_high": 5.0}, (0.3, 5.0)),
    ],
)
def test_clip_limits_are_the_users_or_those_of_the_loss(fields: dict[str, Any], limits: tuple[float, float]) -> None:
    config = ActorConfig(GPT, rollout=ROLLOUT, **fields)
    assert config.clip_limits() == limits
    assert f"clip_ratio_low={limits[0]:g}, clip_ratio_high={limits[1]:g}" in policy_loss_line(config)


@pytest.mark.parametrize(
    ("rows", "tokens", "size"), [(0, 0, (8, 40)), (3, 0, (3, 0)), (0, 90, (0, 90)), (3, 90, (3, 90))]
)
def test_passes_without_gradients_are_as_large_as_in_training_unless_either_size_is_set(
    rows: int, tokens: int, size: tuple[int, int]
) -> None:
    fields = {"rollout": ROLLOUT, "log_prob_micro_batch_size": rows, "log_prob_max_tokens_per_micro_batch": tokens}
    actor = ActorConfig(GPT, ppo_max_tokens_per_micro_batch=40, **fields)
    fields = {"forward_micro_batch_size": rows, "forward_max_tokens_per_micro_batch": tokens}
    critic = CriticConfig(GPT, ppo_max_tokens_per_micro_batch=40, **fields)
    assert actor.scoring_size == critic.scoring_size == size


NUMBERS = {"vocab_size": 8, "max_sequence_length": 8, "num_layers": 1, "hidden_size": 4, "num_attention_heads": 1}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "key",
    [
        *("model.layernorm_epsilon", "model.rope_scaling_factor", "model.rotary_percent", "model.attention_dropout"),
        *("model.hidden_dropout", "model.init_method_std", "optim.lr", "optim.weight_decay", "optim.eps"),
        *("optim.clip_grad", "cliprange_value", "timeout_s"),
    ],
)
def test_numbers_that_are_not_finite_are_rejected_with_the_name_of_the_field(key: str, value: float) -> None:
    outer, _, inner = key.rpartition(".")
    changes: dict[str, Any] = {outer: {inner: value}} if outer else {inner: value}
    with pytest.raises(ConfigError) as caught:
        load_config(CriticConfig, {"model": NUMBERS}, changes)
    assert f"{key} is {value}" in str(caught.value)


def test_a_dropout_of_2_is_rejected() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(CriticConfig, {"model": NUMBERS}, {"model": {"hidden_dropout": 2.0}})
    assert (caught.value.key, caught.value.value) == ("model.hidden_dropout", 2.0)


@pytest.mark.parametrize(
    ("worker", "config", "key"),
    [
        (
            ActorRolloutRefWorker,
            {"model": {}},
            "config",
        ),
        (
            CriticWorker,
            ACTOR,
            "config",
        ),
        (RewardModelWorker, None, "config"),
    ],
)
def test_a_configuration_of_another_type_is_rejected_before_any_process_starts(
    worker: type, config: Any, key: str
) -> None:
    for make in (lambda: RayClassWithInitArgs(worker, config), lambda: RayClassWithInitArgs(worker, config=config)):
        with pytest.raises(ConfigError) as caught:
            make()
        assert caught.value.key == key


def test_wrong_arguments_of_a_role_are_rejected_before_any_process_starts() -> None:
    with pytest.raises(ConfigError) as caught:
        RayClassWithInitArgs(ActorRolloutRefWorker)
    assert caught.value.key == "ActorRolloutRefWorker"
    with pytest.raises(ConfigError) as caught:
        RayClassWithInitArgs(ActorRolloutRefWorker, ACTOR, rol="actor")
    assert caught.value.key == "ActorRolloutRefWorker"


def test_a_subclass_has_a_configuration_of_its_own_type() -> None:
    class Other(CriticWorker):
        config_class = dict

        def __init__(self, config: dict[str, Any], scale: float) -> None: ...

    RayClassWithInitArgs(Other, {"anything": 1}, scale=2.0)
    with pytest.raises(ConfigError) as caught:
        RayClassWithInitArgs(Other, CriticConfig(GPT), scale=2.0)
    assert caught.value.key == "config"
