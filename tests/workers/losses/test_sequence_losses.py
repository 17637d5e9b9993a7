"""Losses of whole responses and averages over tokens, against the formulas of their papers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mcontroller.errors import ConfigError
from trainer import AGGREGATIONS, POLICY_LOSSES, register_policy_loss

CLIP = {"clip_low": 0.1, "clip_high": 0.15, "dual_clip": None}


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([5, 1, 3, 7, 4, 6])
    mask = (torch.arange(7)[None] < lengths[:, None]).double()
    mask[3, 2] = 0.0  # a gap: a tool's output
    log_probs = -torch.rand(6, 7, generator=generator, dtype=torch.float64)
    old = log_probs + 0.3 * torch.randn(6, 7, generator=generator, dtype=torch.float64)
    advantages = torch.randn(6, 1, generator=generator, dtype=torch.float64) * mask
    return log_probs.requires_grad_(), old, advantages, mask


def average(loss: Tensor, mask: Tensor, mode: str) -> Tensor:
    weights = AGGREGATIONS[mode](mask, mask, 10)
    return (loss * weights.tokens).sum() / weights.count


def gradient_of(name: str) -> tuple[Tensor, Tensor]:
    log_probs, old, advantages, mask = batch()
    registered = POLICY_LOSSES[name]
    value = average(registered.function(log_probs, old, advantages, mask, **CLIP).loss, mask, registered.loss_agg_mode)
    return value, torch.autograd.grad(value, log_probs)[0]


def expected(of_row: object) -> tuple[Tensor, Tensor]:
    log_probs, old, advantages, mask = batch()
    rows = []
    for row in range(len(mask)):
        kept = mask[row].bool()
        rows.append(of_row(log_probs[row][kept], old[row][kept], advantages[row][kept][0]))  # type: ignore[operator]
    value = -torch.stack(rows).mean()
    return value, torch.autograd.grad(value, log_probs)[0]


def test_gspo_has_the_value_and_gradient_of_its_paper() -> None:
    def objective(log_probs: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
        ratio = (log_probs - old).mean().exp()
        return torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.15) * advantage)

    for actual, wanted in zip(gradient_of("gspo"), expected(objective), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)


def test_gmpo_has_the_value_and_gradient_of_its_paper() -> None:
    def objective(log_probs: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
        sign = advantage.sign()
        log_ratio = sign * (log_probs - old)
        low, high = (-0.1, 0.15) if sign > 0 else (-0.15, 0.1)
        lower = torch.minimum(log_ratio, log_ratio.clamp(low, high))
        return (sign * lower).mean().exp() * advantage

    for actual, wanted in zip(gradient_of("gmpo"), expected(objective), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)


def test_every_token_of_cispo_has_a_gradient_and_the_clipped_ratio_has_none() -> None:
    log_probs, old, advantages, mask = batch()
    result = POLICY_LOSSES["cispo"].function(log_probs, old, advantages, mask, **CLIP)
    gradient = torch.autograd.grad((result.loss * mask).sum(), log_probs)[0]
    torch.testing.assert_close(gradient, -(log_probs - old).exp().clamp(0.9, 1.15).detach() * advantages)
    assert result.clipped.bool().any() and (gradient[mask.bool()] != 0).all()


def test_gpg_is_the_policy_gradient() -> None:
    log_probs, old, advantages, mask = batch()
    result = POLICY_LOSSES["gpg"].function(log_probs, old, advantages, mask, **CLIP)
    assert torch.equal(torch.autograd.grad((result.loss * mask).sum(), log_probs)[0], -advantages)


@pytest.mark.parametrize(
    ("mode", "by_hand"),
    [
        ("token-mean", (1 + 2 + 3 + 10) / 4),
        ("seq-mean-token-mean", ((1 + 2 + 3) / 3 + 10) / 2),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-sum-norm", (6 + 10) / 2 / 10),
    ],
)
def test_averages_by_hand(mode: str, by_hand: float) -> None:
    loss = torch.tensor([[1.0, 2.0, 3.0], [10.0, 7.0, 7.0], [5.0, 5.0, 5.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])  # the last row is padding
    assert average(loss, mask, mode).item() == pytest.approx(by_hand)


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
def test_averages_do_not_depend_on_how_rows_and_tokens_are_cut(mode: str) -> None:
    _, loss, _, mask = batch()
    whole = average(loss, mask, mode)
    total = count = torch.zeros((), dtype=torch.float64)
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        for columns in (slice(0, 3), slice(3, 7)):  # as context-parallel ranks share them
            part = torch.zeros_like(mask[rows])
            part[:, columns] = mask[rows, columns]
            weights = AGGREGATIONS[mode](part, mask[rows], 10)
            total, count = total + (loss[rows] * weights.tokens).sum(), count + weights.count
    torch.testing.assert_close(total / count, whole, rtol=0, atol=1e-12)


def test_a_loss_with_an_unknown_average_is_rejected() -> None:
    with pytest.raises(ConfigError) as caught:
        register_policy_loss("unknown_average", loss_agg_mode="token_mean")
    assert (caught.value.key, caught.value.value) == ("loss_agg_mode", "token_mean")
