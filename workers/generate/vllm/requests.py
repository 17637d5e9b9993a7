"""Prompts and sampling as requests of vLLM, and its answers as responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workers.config import ModelConfig
from workers.generate.rollout_protocol import Generated, LogProbBasis, Prompts
from workers.generate.sampling import Sampling
from workers.router_replay.routers import NOT_RECORDED

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
    every = model.transformer.get("moe_layer_freq", 1)
    mixed = [index % every == 0 if isinstance(every, int) else every[index] for index in range(model.num_layers)]
    layers, width = [index for index, chosen in enumerate(mixed) if chosen], samples.ids.size(1)
    dtype = torch.int8 if (model.num_moe_experts or 0) <= 128 else torch.int16
    shape = len(answers), width + length, len(layers), model.moe_router_topk
    column = torch.full(shape, NOT_RECORDED, dtype=dtype)
    for row, (_, _, experts) in enumerate(answers):
        start = width - int(samples.attention_mask[row].sum())
        column[row, start : start + len(experts)] = torch.from_numpy(experts[:, layers].astype("int16")).to(dtype)
    return column
