"""Prompts, sampling and answers, as vLLM has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from workers import LogProbBasis, ModelConfig, Prompts, RolloutConfig, Sampling
from workers.generate.vllm.requests import sampling_parameters
from workers.generate.vllm.responses import experts_of, prompt_tokens, responses_of


def sampling(**settings: Any) -> Sampling:
    return Sampling.of(
        RolloutConfig(prompt_length=4, response_length=4), {"eos_token_id": [2, 9], "pad_token_id": 0, **settings}
    )


def test_prompts_lose_their_padding() -> None:
    ids = torch.tensor([[0, 0, 5, 0], [1, 2, 3, 4]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    assert prompt_tokens(Prompts(ids, mask, torch.zeros(2, 1))) == [[5, 0], [1, 2, 3, 4]]


def test_every_sample_has_its_own_seed_if_asked_and_filters_are_passed_on() -> None:
    settings = sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2, response_length=3)
    first, second = sampling_parameters([17, -1], settings, seeded=True)
    assert first == {
        "max_tokens": 3,
        "stop_token_ids": [2, 9],
        "repetition_penalty": 1.2,
        "temperature": 1.0,  # the logits are divided by 0.7 already
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 17,
    }
    assert second == first | {"seed": (1 << 63) - 1}  # -1 would be no seed
    without = {name: value for name, value in first.items() if name != "seed"}
    assert sampling_parameters([17, -1], settings, seeded=False) == [without, without]


def test_greedy_decoding_has_neither_seeds_nor_filters() -> None:
    [values] = sampling_parameters([17], sampling(do_sample=False, top_p=0.5), seeded=True)
    assert values["temperature"] == 0.0 and not values.keys() & {"seed", "top_p", "top_k", "min_p"}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_answers_are_padded_on_the_right(temperature: float) -> None:
    generated = responses_of(
        [([5, 2], [-0.5, -1.5], None), ([7, 8, 7, 8], [-1.0] * 4, None)], sampling(temperature=temperature)
    )
    assert generated.responses.tolist() == [[5, 2, 0, 0], [7, 8, 7, 8]]
    assert generated.mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert generated.log_probs.tolist() == [[-0.5, -1.5, 0, 0], [-1.0] * 4]
    assert generated.basis == LogProbBasis(temperature, filtered=False)


@pytest.mark.parametrize(("experts", "dtype"), [(8, torch.int8), (300, torch.int16)])
def test_experts_are_at_their_tokens_without_the_layers_that_have_none(experts: int, dtype: torch.dtype) -> None:
    sizes = {"num_layers": 3, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9, "max_sequence_length": 16}
    mixture = {"num_moe_experts": experts, "moe_router_topk": 2, "transformer": {"moe_layer_freq": [0, 1, 1]}}
    found = np.arange(3 * 3 * 2).reshape(3, 3, 2).astype("uint16") % experts  # two tokens of the prompt, one response
    samples = Prompts(torch.tensor([[0, 5, 6]]), torch.tensor([[0, 1, 1]]), torch.zeros(1, 1))
    column = experts_of([([7, 2], [-1.0, -1.0], found)], samples, 4, ModelConfig(**sizes, **mixture))  # type: ignore[arg-type]
    assert column.shape == (1, 7, 2, 2) and column.dtype == dtype
    assert torch.equal(column[0, 1:4].long(), torch.from_numpy(found[:, 1:].astype("int64")))
    assert bool((column[0, [0, 4, 5, 6]] == -1).all())
