"""The model of parts b to d: the shape of a 1.7B model with rows of 8k tokens, or a tiny one of the same kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.config import ActorConfig
from workers.gpucheck.case_run import SIZES
from workers.gpucheck.policy import actor_config

__all__ = ["FULL", "TINY", "Scale", "full_rows"]


@dataclass(frozen=True)
class Scale:
    """Sizes of the model, of its rows, and of the rows that are generated at once.

    Attributes:
        model: fields of ModelConfig.
        prompt: tokens of the longest prompt.
        response: tokens of the longest response.
        rows: rows that generate at once.
        decoded: tokens that each of them generates.
        widths: micro-batches of different widths.
        slower: how much longer a second pass over them may take than the first.
        stopped_s: seconds after which a transfer to a stopped process must fail.
    """

    model: dict[str, Any]
    prompt: int
    response: int
    rows: int
    decoded: int
    widths: int
    slower: float
    stopped_s: float

    def config(self, implementation: str, **settings: Any) -> ActorConfig:
        """Return an actor in bfloat16 whose micro-batches are single rows.

        Args:
            implementation: of the layers.
            settings: other fields of ActorConfig; ``rollout`` and ``seed`` are added to the fields of the model.
        """
        model = self.model | {"dtype": "bfloat16", "transformer_impl": implementation, "seed": settings.pop("seed", 1)}
        rollout = {"prompt_length": self.prompt, "response_length": self.response} | settings.pop("rollout", {})
        sizes = {"ppo_micro_batch_size": 1, "ppo_mini_batch_size": 2, "ppo_epochs": 1}
        return actor_config({**sizes, "model": model, "rollout": rollout, "optim": {"lr": 1e-5}, **settings})


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
    rows=32,
    decoded=128,
    widths=20,
    slower=1.2,
    stopped_s=30.0,
)
TINY = Scale(
    model=SIZES | {"qk_layernorm": True, "tie_embeddings": True},
    prompt=24,
    response=40,
    rows=4,
    decoded=8,
    widths=4,
    slower=math.inf,  # the passes are too short to compare
    stopped_s=3.0,
)


def full_rows(scale: Scale, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Return a batch for an update whose rows have these lengths, with prompts of full length.

    Args:
        scale: the sizes.
        lengths: tokens of each row, more than ``scale.prompt``.
    """
    generator = torch.Generator().manual_seed(8)
    response = torch.tensor(lengths)[:, None] - scale.prompt
    mask = (torch.arange(scale.response) < response).long()
    attention = torch.cat((torch.ones(len(lengths), scale.prompt, dtype=torch.long), mask), 1)
    ids = torch.randint(2, scale.model["vocab_size"], attention.shape, generator=generator) * attention
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "responses": ids[:, scale.prompt :],
        "response_mask": mask,
        "old_log_probs": -8.0 * mask,
        "advantages": torch.randn(mask.shape, generator=generator) * mask,
    }
