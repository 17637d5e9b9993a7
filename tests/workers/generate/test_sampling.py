"""Sampling: which tokens are kept, how often each is drawn, and the random numbers of a sample."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from workers.config import RolloutConfig
from workers.generate.sampling import Sampling, draw_tokens, prompt_hashes, sample_seeds, uniform

PLAIN = Sampling.of(RolloutConfig(), {"eos_token_id": 1, "pad_token_id": 0})
LOGITS = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
EVERY_POINT = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000


def frequencies(sampling: Sampling) -> list[float]:
    tokens, _ = draw_tokens(LOGITS.repeat(1000, 1), EVERY_POINT, sampling)
    return (torch.bincount(tokens, minlength=4) / 1000).tolist()


def test_frequencies_equal_the_probabilities() -> None:
    assert frequencies(PLAIN) == pytest.approx([0.1, 0.4, 0.2, 0.3], abs=2e-3)


def test_temperature_sharpens() -> None:
    squares = [0.01, 0.16, 0.04, 0.09]
    assert frequencies(replace(PLAIN, temperature=0.5)) == pytest.approx([p / sum(squares) for p in squares], abs=2e-3)


def test_top_k_keeps_the_most_probable() -> None:
    assert frequencies(replace(PLAIN, top_k=2)) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=2e-3)


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    assert frequencies(replace(PLAIN, top_p=0.69)) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=2e-3)
    assert frequencies(replace(PLAIN, top_p=0.71)) == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9], abs=2e-3)
    assert frequencies(replace(PLAIN, top_p=1e-6)) == [0, 1, 0, 0]


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (7, 1.0), (0, 0.6), (50, 0.6), (200, 0.999), (1, 0.5)])
def test_tokens_equal_those_of_transformers_filters_and_plain_cumulative_sums(top_k: int, top_p: float) -> None:
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(0))
    kept = TopKLogitsWarper(top_k)(None, logits) if top_k else logits
    kept = TopPLogitsWarper(top_p)(None, kept) if top_p < 1 else kept
    ends = kept.double().softmax(-1).cumsum(-1)
    expected = torch.searchsorted(ends[0], EVERY_POINT, right=True)
    tokens, _ = draw_tokens(logits.repeat(1000, 1), EVERY_POINT, replace(PLAIN, top_k=top_k, top_p=top_p))
    assert len(set(tokens.tolist())) > (1 if top_k != 1 else 0)
    on_the_edge = (ends[0][:, None] - EVERY_POINT).abs().min(0).values < 1e-6
    assert torch.equal(tokens[~on_the_edge], expected[~on_the_edge]) and on_the_edge.sum() < 5


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_min_p_and_the_repetition_penalty_equal_those_of_transformers(top_p: float) -> None:
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(0))
    before = torch.randint(200, (1, 50), generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(1, 200, dtype=torch.bool).scatter_(1, before, True)
    kept = RepetitionPenaltyLogitsProcessor(1.5)(before, logits) / 0.7
    kept = TopPLogitsWarper(top_p)(None, kept) if top_p < 1 else kept
    kept = MinPLogitsWarper(0.2)(None, kept)
    ends = kept.double().softmax(-1).cumsum(-1)[0]
    expected = torch.searchsorted(ends, EVERY_POINT, right=True)
    sampling = replace(PLAIN, min_p=0.2, repetition_penalty=1.5, temperature=0.7, top_p=top_p)
    tokens, log_probs = draw_tokens(logits.repeat(1000, 1), EVERY_POINT, sampling, seen.repeat(1000, 1))
    on_the_edge = (ends[:, None] - EVERY_POINT).abs().min(0).values < 1e-6
    assert torch.equal(tokens[~on_the_edge], expected[~on_the_edge]) and on_the_edge.sum() < 5
    assert 1 < len(set(tokens.tolist())) < 100
    torch.testing.assert_close(log_probs, (logits / 0.7).log_softmax(-1)[0][tokens])


@pytest.mark.parametrize("only", [0, 63, 64, 199])
def test_token_with_probability_0_is_never_drawn(only: int) -> None:
    logits = torch.full((2, 200), -torch.inf)
    logits[:, only] = 0.0
    ends = torch.tensor([0.0, 1 - 2**-32], dtype=torch.float64)
    tokens, log_probs = draw_tokens(logits, ends, PLAIN)
    assert tokens.tolist() == [only, only] and log_probs.tolist() == [0.0, 0.0]


def test_log_probability_is_that_before_top_k() -> None:
    tokens, log_probs = draw_tokens(LOGITS[None], torch.tensor([0.5]).double(), replace(PLAIN, top_k=1))
    assert tokens.tolist() == [1]
    assert log_probs.exp().tolist() == pytest.approx([0.4])


def test_without_sampling_the_most_probable_token_is_taken() -> None:
    tokens, _ = draw_tokens(LOGITS[None], None, replace(PLAIN, do_sample=False))
    assert tokens.tolist() == [1]


def test_random_numbers_are_uniform_and_uncorrelated() -> None:
    seeds = sample_seeds(range(20_000), {}, n=1, seed=0, call=0)
    first, second = uniform(seeds, 0), uniform(seeds, 1)
    assert float(first.min()) >= 0 and float(first.max()) < 1
    assert torch.histc(first, 10, 0, 1).tolist() == pytest.approx([2000] * 10, abs=200)
    assert abs(float(torch.corrcoef(torch.stack((first, second)))[0, 1])) < 0.03


def test_hash_depends_on_the_tokens_and_not_on_the_padding() -> None:
    ids = torch.tensor([[0, 0, 5, 7], [0, 5, 7, 0], [0, 0, 7, 5], [9, 9, 5, 7]])
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 1, 1]])
    hashes = prompt_hashes(ids, mask).tolist()
    assert hashes[0] == hashes[1] == hashes[3] != hashes[2]


def test_prompt_that_occurs_twice_is_sampled_as_two_samples_of_it() -> None:
    together = sample_seeds([7, 8], {}, n=2, seed=0, call=0)
    repeated = sample_seeds([7, 7, 8, 8], {}, n=1, seed=0, call=0)
    divided = sample_seeds([8, 8], {7: 2}, n=1, seed=0, call=0), sample_seeds([7], {7: 1}, n=1, seed=0, call=0)
    assert together.tolist() == repeated.tolist()
    assert together[2:].tolist() == divided[0].tolist()
    assert together[1:2].tolist() == divided[1].tolist()
    assert len(set(together.tolist())) == 4


def test_seed_and_call_change_every_sample() -> None:
    base, other_seed, other_call = (
        sample_seeds([7], {}, n=1, seed=seed, call=call).item() for seed, call in ((0, 0), (1, 0), (0, 1))
    )
    assert len({base, other_seed, other_call}) == 3


@pytest.mark.parametrize("ids", [[1, 5], (1, 5), torch.tensor([1, 5]), np.array([1, 5])])
def test_stop_tokens_may_be_a_list_an_array_or_a_tensor(ids: Any) -> None:
    assert Sampling.of(RolloutConfig(), {"eos_token_id": ids, "pad_token_id": 0}).eos_token_ids == (1, 5)
