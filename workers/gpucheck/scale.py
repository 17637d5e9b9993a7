"""The actors of parts b to d, their batches, and the time of calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from mcontroller import DataProto
from workers.config import ActorConfig
from workers.parity.cases import LARGE, MODELS, SMALL
from workers.parity.roles import actor_config
from workers.verify.roles import rows_of_role

GB = 2**30
LAYERS = ["local", "transformer_engine"] if HAVE_TE else ["local"]
"""The implementations of layers that this machine can use; a run uses the last."""
SIZES = SMALL | {"hidden_size": 128, "ffn_hidden_size": 256, "transformer_impl": "local"}
"""Fields of ModelConfig of parts a and e: widths that kernels of a GPU accept, a vocabulary that tp does not divide."""


def _actor(model: Mapping[str, Any], prompt: int, response: int) -> ActorConfig:
    """Return an actor in bfloat16 with packed micro-batches of two rows of ``prompt + response`` tokens."""
    return actor_config(
        {
            "model": {**model, "dtype": "bfloat16", "transformer_impl": LAYERS[-1]},
            "rollout": {"prompt_length": prompt, "response_length": response},
            "optim": {"lr": 1e-5},
            "ppo_micro_batch_size": 2,  # with fewer tokens, launching kernels takes longer than running them
            "ppo_mini_batch_size": 8,
            "packed": True,
            "log_prob_chunk_tokens": prompt + response,
        }
    )


FULL = _actor(LARGE, 1024, 7168)
TINY = _actor(SIZES | {"max_sequence_length": 64, "qk_layernorm": True, "tie_embeddings": True}, 24, 40)
"""The smallest sizes with which every check runs."""
EXPERTS = _actor(SIZES | MODELS["experts"] | {"max_sequence_length": 64, "qk_layernorm": True}, 24, 40)
"""An actor for engines that record the experts of tokens."""


def batch_of(actor: ActorConfig) -> DataProto:
    """Return a batch for an update of rows of full length."""
    rollout = actor.rollout
    return rows_of_role(0, actor, actor.ppo_mini_batch_size, rollout.prompt_length, rollout.response_length)


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Return how many seconds a call takes until the device has done its work, and its result."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    result = function(*arguments)
    torch.cuda.synchronize()
    return time.perf_counter() - started, result


def fastest(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Return the seconds of the fastest of three calls, and the result of the last."""
    results = [timed(function, *arguments) for _ in range(3)]
    return min(seconds for seconds, _ in results), results[-1][1]
