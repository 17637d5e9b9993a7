"""Prompts and sampling as requests of vLLM, and its answers as responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from workers.generate.rollout_protocol import Generated, LogProbBasis, Prompts
from workers.generate.sampling import Sampling

_SEED_BITS = (1 << 63) - 1


def prompt_tokens(samples: Prompts) -> list[list[int]]:
    """Return the token ids of every prompt, without its padding."""
    rows = zip(samples.ids, samples.attention_mask.bool(), strict=True)
    return [ids[attended].tolist() for ids, attended in rows]


def sampling_parameters(seeds: Sequence[int], sampling: Sampling, *, seeded: bool) -> list[dict[str, Any]]:
    """Return the arguments of ``vllm.SamplingParams`` of every sample.

    The temperature is not among them: ``PolicyReceiver`` divides the logits by it. vLLM takes a seed below 0 for none,
    so the sign is dropped.

    Args:
        seeds: of the samples.
        sampling: how they are generated.
        seeded: whether the samples have seeds. vLLM draws their tokens one row at a time, and all others together.
    """
    common: dict[str, Any] = {
        "max_tokens": sampling.response_length,
        "stop_token_ids": list(sampling.eos_token_ids),
        "repetition_penalty": sampling.repetition_penalty,
        "temperature": 0.0,
    }
    if not sampling.do_sample:
        return [common] * len(seeds)
    filters = {"temperature": 1.0, "top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
    return [common | filters | ({"seed": seed & _SEED_BITS} if seeded else {}) for seed in seeds]


def responses_of(answers: Sequence[tuple[Sequence[int], Sequence[float]]], sampling: Sampling) -> Generated:
    """Return the responses as tensors.

    Args:
        answers: of each sample, its tokens and their log-probabilities at the temperature and before all filters.
        sampling: how they were generated.
    """
    shape = len(answers), sampling.response_length
    responses = torch.full(shape, sampling.pad_token_id)
    mask, log_probs = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
    for row, (tokens, scores) in enumerate(answers):
        responses[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
        log_probs[row, : len(tokens)] = torch.tensor(scores)
    return Generated(responses, mask, log_probs, LogProbBasis(sampling.temperature, filtered=False))
