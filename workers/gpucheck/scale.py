"""The model of parts b to d, its batches, and the time of calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from mcontroller import DataProto
from workers.config import ActorConfig
from workers.gpucheck.report import Report
from workers.parity.cases import SMALL, prompt_columns
from workers.parity.roles import TOKENS, actor_config
from workers.verify.roles import rows_of_role

GB = 2**30
LAYERS = ["local", "transformer_engine"] if HAVE_TE else ["local"]
"""The implementations of layers that this machine can use; a run uses the last."""
SIZES = SMALL | {"hidden_size": 128, "ffn_hidden_size": 256, "transformer_impl": "local"}
"""Fields of ModelConfig of parts a and e: widths that kernels of a GPU accept, a vocabulary that tp does not divide."""


@dataclass(frozen=True)
class Scale:
    """Sizes of the model of parts b to d, of its rows, and of the rows that are generated at once.

    Attributes:
        model: fields of ModelConfig.
        prompt: tokens of the longest prompt.
        response: tokens of the longest response.
        updated: rows of an update.
        packed: rows of a micro-batch: with few tokens, launching kernels takes longer than running them.
        rows: rows that generate at once.
        decoded: tokens that each of them generates.
    """

    model: dict[str, Any]
    prompt: int
    response: int
    updated: int
    packed: int
    rows: int
    decoded: int

    def config(
        self, layers: str = LAYERS[-1], seed: int = 1, transformer: Mapping[str, Any] | None = None, **rollout: Any
    ) -> ActorConfig:
        """Return an actor in bfloat16 with packed micro-batches.

        Args:
            layers: their implementation.
            seed: of the weights.
            transformer: fields of Megatron's TransformerConfig.
            **rollout: fields of RolloutConfig.
        """
        model = self.model | {"dtype": "bfloat16", "transformer_impl": layers, "seed": seed}
        settings = {
            "model": model | {"transformer": transformer or {}},
            "rollout": {"prompt_length": self.prompt, "response_length": self.response, **rollout},
            "optim": {"lr": 1e-5},
            "ppo_micro_batch_size": self.packed,
            "ppo_mini_batch_size": self.updated,
            "ppo_epochs": 1,
            "packed": True,
            "log_prob_chunk_tokens": self.prompt + self.response,
        }
        return actor_config(settings)

    def batch(self) -> DataProto:
        """Return a batch for an update of rows of full length."""
        return rows_of_role(0, self.config(), self.updated, self.prompt, self.response)

    def prompts(self, **settings: Any) -> DataProto:
        """Return prompts of different lengths; ``settings`` are those of the generation."""
        columns = prompt_columns(self.rows, self.prompt, self.model["vocab_size"])
        return DataProto.from_dict(columns, meta_info=TOKENS | settings)


FULL = Scale(
    model={
        "vocab_size": 151_936,
        "max_sequence_length": 8192,
        "num_layers": 28,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_query_groups": 8,
        "kv_channels": 128,
        "ffn_hidden_size": 6144,
        "qk_layernorm": True,
        "tie_embeddings": True,
        "rotary_base": 1_000_000,
        "layernorm_epsilon": 1e-6,
    },
    prompt=1024,
    response=7168,
    updated=8,
    packed=2,
    rows=32,
    decoded=128,
)
"""A model of the shape of Qwen3-1.7B."""
TINY = Scale(
    model=SIZES | {"max_sequence_length": 64, "qk_layernorm": True, "tie_embeddings": True},
    prompt=24,
    response=40,
    updated=2,
    packed=1,
    rows=4,
    decoded=8,
)
"""The smallest sizes with which every check runs."""


@dataclass(frozen=True)
class Session:
    """One run of the checks.

    Attributes:
        report: gets the rows.
        scale: of the model of parts b to d.
        folder: for checkpoints.
        vllm_python: the interpreter of engines.
    """

    report: Report
    scale: Scale
    folder: Path
    vllm_python: str


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
