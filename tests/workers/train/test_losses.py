"""The losses against their formulas, and vocabulary-parallel log-probabilities against the whole vocabulary."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcontroller.errors import ConfigError
from tests.ranks import run_ranks
from tests.training import device
from workers.model.vocab_parallel import log_probs_and_entropy
from workers.train.losses import masked_sum, value_loss
from workers.train.metrics import TOKENS as TOKENS_KEY
from workers.train.metrics import Rule, reduce_reports

TOKENS, HIDDEN, VOCAB = 12, 8, 10


def test_masked_sums_ignore_masked_values() -> None:
    values = torch.tensor([1.0, math.nan, 3.0, math.inf])
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert masked_sum(values, mask) == 4


def test_a_loss_that_does_not_report_what_metrics_names_is_an_error() -> None:
    report = {"loss": torch.tensor(1.0), TOKENS_KEY: torch.tensor(2.0)}
    with pytest.raises(ConfigError) as caught:
        reduce_reports([report], {"loss": Rule.LOSS_MEAN, "ppo_kl": Rule.TOKEN_MEAN}, Any, torch.device("cpu"))
    assert caught.value.key == "metrics"


@pytest.mark.parametrize(
    ("value", "clip", "loss", "clipped"),
    [
        (0.3, 0.5, 0.5 * 0.7**2, 0),
        (0.9, 0.5, 0.5 * 0.5**2, 1),
        (0.9, None, 0.5 * 0.1**2, 0),
        (-0.9, 0.5, 0.5 * 1.9**2, 0),
    ],
)
def test_value_loss_stays_near_the_old_value(value: float, clip: float | None, loss: float, clipped: int) -> None:
    result = value_loss(torch.tensor([value]), torch.zeros(1), torch.ones(1), clip=clip)
    assert result.loss.item() == pytest.approx(loss)
    assert result.clipped.item() == clipped


def whole_vocabulary(temperature: float) -> dict[str, torch.Tensor]:
    """Values and gradients by log_softmax over all logits at once."""
    hidden, weight, targets, upstream = tensors()
    log_probs = torch.log_softmax(hidden @ weight.T / temperature, -1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return with_gradients(log_probs.gather(-1, targets[:, None])[:, 0], entropy, hidden, weight, upstream)


def divided_vocabulary(temperature: float, chunk_tokens: int) -> dict[str, torch.Tensor]:
    """On this rank's part of a vocabulary padded to divide, with the gradients that the tp axis would sum."""
    hidden, weight, targets, upstream = (tensor.detach().to(device()) for tensor in tensors())
    hidden.requires_grad_()
    size, rank = dist.get_world_size(), dist.get_rank()
    padded = torch.cat((weight, torch.ones(-VOCAB % size, HIDDEN, device=device())))
    part = padded.chunk(size)[rank].clone().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(
        hidden,
        lambda some: some @ part.T,
        targets,
        dist.group.WORLD,
        vocab_size=VOCAB,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
    )
    result = with_gradients(log_probs, entropy, hidden, part, upstream)
    dist.all_reduce(result["hidden"])
    return result


def tensors() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).requires_grad_()
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    return hidden, weight, targets, torch.randn(2, TOKENS, generator=generator)


def with_gradients(
    log_probs: torch.Tensor, entropy: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, upstream: torch.Tensor
) -> dict[str, torch.Tensor]:
    (log_probs * upstream[0] + entropy * upstream[1]).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return {
        "log_probs": log_probs.detach(),
        "entropy": entropy.detach(),
        "hidden": hidden.grad,
        "weight": weight.grad,
    }


@pytest.mark.simulated
@pytest.mark.parametrize("chunk_tokens", [64, 5])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_divided_vocabulary_has_the_log_probs_and_gradients_of_the_whole(world_size: int, chunk_tokens: int) -> None:
    expected = whole_vocabulary(0.7)
    ranks: list[dict[str, Any]] = run_ranks(divided_vocabulary, world_size, 0.7, chunk_tokens)
    for actual in ranks:
        for name in ("log_probs", "entropy", "hidden"):
            torch.testing.assert_close(actual[name], expected[name], atol=1e-5, rtol=1e-5)
    weight = torch.cat([actual["weight"] for actual in ranks])
    torch.testing.assert_close(weight[:VOCAB], expected["weight"], atol=1e-5, rtol=1e-5)
    assert (weight[VOCAB:] == 0).all()
