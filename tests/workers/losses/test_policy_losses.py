"""Policy losses against their formulas, and custom ones by name."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcontroller.errors import ConfigError
from trainer import POLICY_LOSSES, PolicyLoss, estimate_kl, register_kl_estimator, register_policy_loss
from workers.config import ActorConfig, ModelConfig
from workers.losses.policy import AGGREGATIONS, Weights, clipped_policy_loss
from workers.train.losses import policy_metrics, policy_objective
from workers.train.metrics import Rule


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.1, 2.0, -2.2, 0),  # within the range
        (1.5, 2.0, -2.6, 1),  # a good token counts up to 1 + clip_high
        (0.5, 2.0, -1.0, 0),
        (1.5, -2.0, 3.0, 0),
        (0.5, -2.0, 1.6, 1),  # a bad token counts down to 1 - clip_low
        (9.0, -2.0, 6.0, 1),  # the dual clip
    ],
)
def test_the_ppo_loss_is_clipped(ratio: float, advantage: float, loss: float, clipped: int) -> None:
    result = POLICY_LOSSES["ppo"].function(
        torch.tensor([math.log(ratio)]),
        torch.zeros(1),
        torch.tensor([advantage]),
        torch.ones(1),
        clip_low=0.2,
        clip_high=0.3,
        dual_clip=3,
    )
    assert result.loss.item() == pytest.approx(loss)
    assert result.clipped.item() == clipped
    assert result.ratio.item() == pytest.approx(ratio)


def test_a_clipped_token_has_no_gradient() -> None:
    log_probs = torch.tensor([math.log(1.5), math.log(1.1)], requires_grad=True)
    zeros, ones = torch.zeros(2), torch.ones(2)
    clipped_policy_loss(log_probs, zeros, ones, ones, clip_low=0.2, clip_high=0.2).loss.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([0.0, -1.1])


def test_a_custom_loss_is_chosen_by_its_name() -> None:
    @register_policy_loss("plain_for_this_test")
    def plain(log_probs: Any, old_log_probs: Any, advantages: Any, mask: Any, **clip: Any) -> PolicyLoss:
        ratio = torch.exp(log_probs - old_log_probs)
        return PolicyLoss(-advantages * ratio, ratio, torch.zeros_like(ratio))

    assert POLICY_LOSSES["plain_for_this_test"].function is plain
    with pytest.raises(ConfigError) as caught:
        register_policy_loss("plain_for_this_test")(clipped_policy_loss)
    assert caught.value.key == "plain_for_this_test"


def test_a_loss_reports_metrics_under_its_names() -> None:
    @register_policy_loss("with_metric_for_this_test", metrics=("far",))
    def with_metric(log_probs: Any, old_log_probs: Any, advantages: Any, mask: Any, **clip: Any) -> PolicyLoss:
        ratio = torch.exp(log_probs - old_log_probs)
        return PolicyLoss(-advantages * ratio, ratio, torch.zeros_like(ratio), {"far": (ratio - 1).abs()})

    config = choosing(policy_loss="with_metric_for_this_test")
    report = objective(config, torch.zeros(1, 3))
    assert report["far"].item() == pytest.approx(1.0)  # the sum over the mask
    assert policy_metrics(config)["far"] is Rule.TOKEN_MEAN


def choosing(**fields: Any) -> ActorConfig:
    model = ModelConfig(vocab_size=8, max_sequence_length=8, num_layers=1, hidden_size=8, num_attention_heads=1)
    return ActorConfig(model=model, **fields)


def objective(config: ActorConfig, old_log_probs: torch.Tensor) -> dict[str, torch.Tensor]:
    """The report for a row of three tokens, of which two count."""
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    columns = {"advantages": torch.ones(1, 3), "old_log_probs": old_log_probs, "ref_log_prob": torch.zeros(1, 3)}
    rows: Any = SimpleNamespace(mask=mask, whole_mask=mask, columns=columns)
    group: Any = SimpleNamespace(size=lambda: 1)
    log_probs = torch.tensor([[1.5, 0.5, 9.0]]).log().requires_grad_()
    return policy_objective(config, rows, log_probs, torch.zeros(1, 3), group)[2]


@pytest.mark.parametrize("change", [torch.Tensor.detach, torch.Tensor.mean, lambda loss: loss.mean(1, keepdim=True)])
def test_a_loss_without_gradients_or_not_of_tokens_is_an_error(change: Any) -> None:
    name = f"changed_by_{id(change)}"

    @register_policy_loss(name)
    def changed(log_probs: Any, old_log_probs: Any, advantages: Any, mask: Any, **clip: Any) -> PolicyLoss:
        ratio = torch.exp(log_probs - old_log_probs)
        return PolicyLoss(change(-advantages * ratio), ratio, torch.zeros_like(ratio))

    register_kl_estimator(name)(change)
    for key, fields in {"policy_loss": {}, "kl_loss_type": {"use_kl_loss": True, "policy_loss": "ppo"}}.items():
        with pytest.raises(ConfigError) as caught:
            objective(choosing(**{key: name, **fields}), torch.zeros(1, 3))
        assert caught.value.fields == {"key": key, "value": name}


@pytest.mark.parametrize(
    "returned",
    [
        None,
        torch.zeros(1, 3),
        (torch.zeros(1, 3),) * 3,
        PolicyLoss(torch.zeros(1, 3), None, torch.zeros(1, 3)),  # type: ignore[arg-type]
        PolicyLoss(*[torch.zeros(1, 3)] * 3, metrics=None),  # type: ignore[misc, arg-type]
        PolicyLoss(*[torch.zeros(1, 3)] * 3, metrics={"unknown": torch.zeros(1, 3)}),  # type: ignore[misc]
    ],
    ids=["nothing", "a tensor", "a tuple", "no ratio", "no metrics", "another metric"],
)
def test_a_loss_that_returns_something_else_is_an_error(returned: Any) -> None:
    name = f"returning_{id(returned)}"
    register_policy_loss(name)(lambda *args, **clip: returned)
    with pytest.raises(ConfigError) as caught:
        objective(choosing(policy_loss=name), torch.zeros(1, 3))
    assert caught.value.fields == {"key": "policy_loss", "value": name}


@pytest.mark.parametrize("returned", [torch.ones(1, 3), Weights(torch.ones(3), torch.ones(()))])
def test_an_average_that_returns_no_weights_of_tokens_is_an_error(returned: Any) -> None:
    name = f"returning_{id(returned)}"
    AGGREGATIONS.register(name)(lambda *masks: returned)
    with pytest.raises(ConfigError) as caught:
        objective(choosing(loss_agg_mode=name), torch.zeros(1, 3))
    assert caught.value.fields == {"key": "loss_agg_mode", "value": name}


@pytest.mark.parametrize("returned", [None, 1.0, torch.zeros(3)])
def test_an_estimator_that_returns_no_value_of_every_token_is_an_error(returned: Any) -> None:
    name = f"returning_{id(returned)}"
    register_kl_estimator(name)(lambda log_ratio: returned)
    with pytest.raises(ConfigError) as caught:
        estimate_kl(torch.zeros(1, 3), torch.zeros(1, 3), name, clip=1.0)
    assert caught.value.fields == {"key": "kl_penalty", "value": name}


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("metrics", ("entropy",)),
        ("metrics", ("training/rollout_kl",)),
        ("metrics", "far"),
        ("columns", "values"),
        ("unused", ("clip_rato",)),
    ],
)
def test_names_that_are_taken_unknown_or_letters_are_an_error(key: str, names: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        register_policy_loss("with_wrong_names", **{key: names})
    assert caught.value.key == key
