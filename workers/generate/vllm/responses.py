"""Prompts of a batch as requests of vLLM, and its answers as responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workers.config import ModelConfig
from workers.generate.rollout_protocol import Generated, LogProbBasis, Prompts
from workers.generate.sampling import Sampling
from workers.router_replay.routers import NOT_RECORDED


def prompt_tokens(samples: Prompts) -> list[list[int]]:
    """Return the token ids of every prompt, without its padding."""
    rows = zip(samples.ids, samples.attention_mask.bool(), strict=True)
    return [ids[attended].tolist() for ids, attended in rows]


def responses_of(
    answers: Sequence[tuple[Sequence[int], Sequence[float], Any]], sampling: Sampling, experts: Tensor | None = None
) -> Generated:
    """Return the responses as tensors.

    Args:
        answers: of each sample, its tokens and their log-probabilities at the temperature and before all filters.
        sampling: how they were generated.
        experts: ``routed_experts`` of the responses, if they are recorded.
    """
    shape = len(answers), sampling.response_length
    responses = torch.full(shape, sampling.pad_token_id)
    mask, log_probs = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
    for row, (tokens, scores, _) in enumerate(answers):
        responses[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
        log_probs[row, : len(tokens)] = torch.tensor(scores)
    return Generated(responses, mask, log_probs, LogProbBasis(sampling.temperature, filtered=False), experts)


def experts_of(
    answers: Sequence[tuple[Sequence[int], Sequence[float], Any]], samples: Prompts, length: int, model: ModelConfig
) -> Tensor:
    """Return ``routed_experts`` of ``Generated``, from the experts that vLLM returns for every layer.

    Args:
        answers: of each sample, its tokens, log-probabilities and experts ``[tokens - 1, layers, topk]``.
        samples: the prompts of the samples.
        length: [tokens] the columns of the responses.
        model: of the policy, whose layers without experts are left out.
    """
    layers, width, dtype = expert_layers(model), samples.ids.size(1), expert_dtype(model)
    shape = len(answers), width + length, len(layers), model.moe_router_topk
    column = torch.full(shape, NOT_RECORDED, dtype=dtype)
    for row, (_, _, experts) in enumerate(answers):
        start = width - int(samples.attention_mask[row].sum())
        column[row, start : start + len(experts)] = torch.from_numpy(experts[:, layers].astype("int16")).to(dtype)
    return column


def expert_layers(model: ModelConfig) -> list[int]:
    """Return the indices of the layers that have experts."""
    every = model.transformer.get("moe_layer_freq", 1)
    mixed = [index % every == 0 if isinstance(every, int) else every[index] for index in range(model.num_layers)]
    return [index for index, chosen in enumerate(mixed) if chosen]


def expert_dtype(model: ModelConfig) -> torch.dtype:
    """Return the dtype in which the experts of tokens are recorded."""
    return torch.int8 if (model.num_moe_experts or 0) <= 128 else torch.int16
