"""What a request of vLLM says about sampling, and where an engine takes requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workers.config import RolloutConfig
from workers.generate.sampling import Sampling

_SEED_BITS = (1 << 63) - 1


@dataclass(frozen=True)
class EngineAddress:
    """Where an engine takes requests.

    Attributes:
        host, port: of its socket.
        token: that a program has to send first.
        config: the default settings of sampling.
        vocab_size: of the policy.
        expert_dtype: of the experts of tokens, if they are recorded.
    """

    host: str
    port: int
    token: str
    config: RolloutConfig
    vocab_size: int
    expert_dtype: torch.dtype | None = None


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
