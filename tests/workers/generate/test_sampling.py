"""Sampling: which tokens are kept, how often each is drawn, and the random numbers of a sample."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from mcontroller.errors import ConfigError
from workers.config import RolloutConfig
from workers.generate.sampling import Sampling, draw_tokens, position_keys, prompt_hashes, sample_seeds

PLAIN = Sampling.of(RolloutConfig(), {"eos_token_id": 1, "pad_token_id": 0})
LOGITS = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
KEYS = position_keys(sample_seeds(range(20_000), {}, n=1, seed=0, call=0), 0)


def assert_drawn_as(tokens: torch.Tensor, probs: torch.Tensor) -> None:
    """Pearson's chi-square test against the probabilities of the ids, at about five standard deviations."""
    expected = probs.double() * len(tokens)
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    assert counts[expected == 0].sum() == 0
    few = (expected > 0) & (expected < 5)  # the test needs at least 5 expected in each class; these are one class
    many = expected >= 5
    counts = torch.cat((counts[many], counts[few].sum()[None]))
    expected = torch.cat((expected[many], expected[few].sum()[None]))
    counts, expected = counts[expected >= 5], expected[expected >= 5]
    statistic, freedom = float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1
    assert statistic <= freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 0, 1.0), (1.0, 7, 1.0), (1.0, 0, 0.6), (0.7, 50, 0.6), (1.0, 1, 0.5)],
)
def test_tokens_are_drawn_with_the_probabilities_of_transformers_filters(
    temperature: float, top_k: int, top_p: float
) -> None:
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(0))
    kept = logits / temperature
    kept = TopKLogitsWarper(top_k)(None, kept) if top_k else kept
    kept = TopPLogitsWarper(top_p)(None, kept) if top_p < 1 else kept
    sampling = replace(PLAIN, temperature=temperature, top_k=top_k, top_p=top_p)
    tokens, log_probs = draw_tokens(logits.repeat(len(KEYS), 1), KEYS, sampling)
    assert_drawn_as(tokens, kept.softmax(-1)[0])
    torch.testing.assert_close(log_probs, (logits / temperature).log_softmax(-1)[0][tokens])


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_min_p_and_the_repetition_penalty_equal_those_of_transformers(top_p: float) -> None:
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(0))
    before = torch.randint(200, (1, 50), generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(1, 200, dtype=torch.bool).scatter_(1, before, True)
    kept = RepetitionPenaltyLogitsProcessor(1.5)(before, logits) / 0.7
    kept = TopPLogitsWarper(top_p)(None, kept) if top_p < 1 else kept
    kept = MinPLogitsWarper(0.2)(None, kept)
    sampling = replace(PLAIN, min_p=0.2, repetition_penalty=1.5, temperature=0.7, top_p=top_p)
    tokens, log_probs = draw_tokens(logits.repeat(len(KEYS), 1), KEYS, sampling, seen.repeat(len(KEYS), 1))
    assert_drawn_as(tokens, kept.softmax(-1)[0])
    assert 1 < len(set(tokens.tolist())) < 100
    torch.testing.assert_close(log_probs, (logits / 0.7).log_softmax(-1)[0][tokens])


@pytest.mark.parametrize("only", [0, 63, 64, 199])
def test_token_with_probability_0_is_never_drawn(only: int) -> None:
    logits = torch.full((2, 200), -torch.inf)
    logits[:, only] = 0.0
    tokens, log_probs = draw_tokens(logits, KEYS[:2], PLAIN)
    assert tokens.tolist() == [only, only] and log_probs.tolist() == [0.0, 0.0]


def test_without_sampling_the_most_probable_token_is_taken() -> None:
    tokens, _ = draw_tokens(LOGITS[None], None, replace(PLAIN, do_sample=False))
    assert tokens.tolist() == [1]


def test_keys_and_tokens_equal_those_of_arithmetic_with_python_integers() -> None:
    mask, gamma = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(value: int) -> int:
        value = value + gamma & mask
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
        value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
        return value ^ value >> 31

    def gumbel(key: int, counter: int) -> float:
        return -math.log(-math.log(((mix(key + gamma * (counter + 1) & mask) >> 12) + 0.5) / 2**52))

    seeds = [0, 5, -7, (1 << 63) - 1]
    keys = [mix(seed + gamma * 4 & mask) for seed in seeds]
    found = position_keys(torch.tensor(seeds), 3)
    assert [key & mask for key in found.tolist()] == keys
    tokens, _ = draw_tokens(torch.zeros(4, 192), found, PLAIN)
    for key, token in zip(keys, tokens.tolist(), strict=True):
        block = max(range(3), key=lambda number: gumbel(key, 2 * number + 1))
        assert token == max(range(64 * block, 64 * block + 64), key=lambda each: gumbel(key, 2 * each))


def test_draws_of_different_positions_are_independent() -> None:
    seeds = sample_seeds(range(20_000), {}, n=1, seed=0, call=0)
    first, second = (draw_tokens(torch.zeros(20_000, 128), position_keys(seeds, step), PLAIN)[0] for step in (0, 1))
    assert_drawn_as(first, torch.full((128,), 1 / 128))
    pairs = first // 16 * 8 + second // 16
    assert_drawn_as(pairs, torch.full((64,), 1 / 64))


@pytest.mark.parametrize(
    ("filters", "most"), [({}, 3), ({"top_k": 50, "top_p": 0.9}, 6)], ids=["whole", "top-k and top-p"]
)
def test_bfloat16_rounding_of_another_layout_changes_few_of_256_tokens(filters: dict[str, Any], most: int) -> None:
    """Filters keep the tokens with the largest logits, which bfloat16 rounds by the most."""
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(6, 256, 64, generator=generator)  # of a row-parallel sum, which the layouts add up differently
    head = (torch.randn(64, 1_003, generator=generator) * 0.1).bfloat16()
    keys, sampling = KEYS[:256], replace(PLAIN, **filters)
    drawn = []
    for tp in (1, 2, 3):
        hidden = torch.zeros(256, 64, dtype=torch.bfloat16)
        for part in parts.chunk(tp):
            hidden = hidden + part.sum(0).bfloat16()
        drawn.append(draw_tokens(hidden @ head, keys, sampling)[0])
    assert max(int((drawn[0] != other).sum()) for other in drawn[1:]) <= most


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


def test_a_misspelled_setting_is_rejected_and_other_keys_are_ignored() -> None:
    tokens = {"eos_token_id": 1, "pad_token_id": 0}
    with pytest.raises(ConfigError) as caught:
        Sampling.of(RolloutConfig(), tokens | {"temprature": 0.5})
    assert (caught.value.key, caught.value.value) == ("temprature", 0.5)
    assert Sampling.of(RolloutConfig(), tokens | {"metrics": {}, "name": "x", "step": 3, "N": 1}) == PLAIN
