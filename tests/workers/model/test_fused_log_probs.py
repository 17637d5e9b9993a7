"""Scores from logits in their own dtype are those of a float32 copy, with their gradients, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import run_ranks
from workers.model import vocab_parallel
from workers.model.vocab_parallel import FusedLogProbs, vocab_parallel_log_probs

TOKENS, VOCABULARY, PADDED = 37, 120, 128


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(TOKENS, PADDED, generator=generator)).to(dtype)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return logits, targets, *torch.randn(2, TOKENS, generator=generator)


def scored(fused: bool, logits: Tensor, divisor: Any, targets: Tensor, group: Any, weights: Any) -> list[Tensor]:
    """Return log-probabilities, entropies, and the gradient of their weighted sum."""
    logits = logits.clone().requires_grad_()
    if fused:
        scores = FusedLogProbs.apply(logits, torch.as_tensor(divisor), targets, group, VOCABULARY)
    else:
        scores = vocab_parallel_log_probs(logits.float() / divisor, targets, group, vocab_size=VOCABULARY)
    sum((values * factors).sum() for values, factors in zip(scores, weights, strict=True)).backward()
    assert logits.grad is not None
    return [scores[0].detach(), scores[1].detach(), logits.grad.float()]


@pytest.fixture(autouse=True)
def step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the functions uncompiled: a compiler for a CPU may be missing, and needs half a minute."""
    monkeypatch.setattr(vocab_parallel, "_compiled", lambda function: function)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7, "of each token"])
def test_scores_and_gradients_are_those_of_float32_logits(dtype: torch.dtype, temperature: Any) -> None:
    logits, targets, *weights = inputs(dtype)
    divisor = torch.linspace(0.5, 1.5, TOKENS)[:, None] if isinstance(temperature, str) else temperature
    arguments = (logits, divisor, targets, None, weights)
    for actual, expected in zip(scored(True, *arguments), scored(False, *arguments), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def on_two_ranks() -> list[Tensor]:
    logits, targets, *weights = inputs(torch.float32)
    return scored(True, logits.chunk(2, 1)[dist.get_rank()], 0.7, targets, dist.group.WORLD, weights)


@pytest.mark.simulated
def test_ranks_that_divide_the_vocabulary_have_the_scores_of_one() -> None:
    logits, targets, *weights = inputs(torch.float32)
    expected = scored(False, logits, 0.7, targets, None, weights)
    ranks = run_ranks(on_two_ranks, 2)
    for rank in ranks:
        torch.testing.assert_close(rank[0], expected[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(rank[1], expected[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat([rank[2] for rank in ranks], 1), expected[2], atol=1e-5, rtol=1e-5)
