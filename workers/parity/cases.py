"""The cases that ``gpucheck`` and the parity tests share: models, batch, optimizer steps and settings.

``gpucheck`` compares one GPU with the CPU, and layouts over NCCL with one process; the parity tests compare layouts on
simulated ranks and over gloo.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

ROWS, STEPS, EXPERTS = 16, 3, 4
"""Rows of a batch, optimizer steps with it, and experts of a layer."""

SMALL: dict[str, Any] = {
    "vocab_size": 61,  # which tp does not divide
    "max_sequence_length": 32,
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 64,
    "init_method_std": 0.05,
}
"""Sizes of the parity tests, as fields of ModelConfig."""
LARGE: dict[str, Any] = {
    "vocab_size": 151_936,
    "max_sequence_length": 8192,
    "num_layers": 28,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_query_groups": 8,
    "ffn_hidden_size": 6144,
    "qk_layernorm": True,
    "tie_embeddings": True,
    "rotary_base": 1_000_000,
    "layernorm_epsilon": 1e-6,
}
"""A model of the shape of Qwen3-1.7B, whose memory and speed are measured, as fields of ModelConfig."""

DECISIVE = "decisive routers"
"""The experts' model, for callers that give it weights with which no choice of an expert is close."""

_EXPERTS: dict[str, Any] = {"num_moe_experts": EXPERTS, "moe_ffn_hidden_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "qk norm": {"qk_layernorm": True},
    "tied embeddings": {"tie_embeddings": True},
    "learned positions": {"position_embedding_type": "learned_absolute"},
    "biases, GELU": {
        "normalization": "LayerNorm",
        "gated_linear_unit": False,
        "activation": "gelu",
        "add_bias_linear": True,
    },
    "experts": _EXPERTS | {"transformer": {"moe_router_load_balancing_type": "none"}},
    "router losses by row": _EXPERTS
    | {
        "transformer": {
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_aux_loss_coeff": 0.2,
            "moe_z_loss_coeff": 0.01,
        }
    },
    "router losses": _EXPERTS
    | {
        "transformer": {
            "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
            "moe_aux_loss_coeff": [0.1, 0.1],
            "moe_z_loss_coeff": 0.01,
        }
    },
}
MODELS[DECISIVE] = MODELS["experts"]
"""The kinds of models, as fields of ModelConfig in addition to the sizes."""


@dataclass(frozen=True)
class Case:
    """A model on ``ranks`` ranks, with settings that do not change the result.

    Attributes:
        ranks: number of ranks.
        parallel: sizes of the axes.
        model: a key of ``MODELS``.
        optim: fields of OptimConfig.
        transformer: fields of Megatron's TransformerConfig.
        max_tokens: limit of a micro-batch in tokens; 0 for two rows.
        packed: whether the rows of a micro-batch are one sequence.
    """

    ranks: int = 1
    parallel: Mapping[str, Any] = field(default_factory=dict)
    model: str = "dense"
    optim: Mapping[str, Any] = field(default_factory=dict)
    transformer: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int = 0
    packed: bool = False

    def settings(self, dtype: str, sizes: Mapping[str, Any] = SMALL) -> dict[str, Any]:
        """Return the fields that ActorConfig and CriticConfig have in common: one optimizer step for each batch.

        Args:
            dtype: of the model.
            sizes: fields of ModelConfig.
        """
        model = {**sizes, **MODELS[self.model], "dtype": dtype}
        return {
            "model": model | {"transformer": {**model.get("transformer", {}), **self.transformer}},
            "parallel": dict(self.parallel),
            # A larger eps than usual: otherwise Adam turns rounding on near-zero gradients into steps of full size.
            "optim": {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.01, "warmup_steps": 0, **self.optim},
            "ppo_mini_batch_size": ROWS,
            "ppo_micro_batch_size": 2,
            "ppo_epochs": 1,
            "ppo_max_tokens_per_micro_batch": self.max_tokens,
            "packed": self.packed,
        }


_DISTRIBUTED = {"distributed_optimizer": True}
_OVERLAP = _DISTRIBUTED | {"overlap_grad_reduce": True, "overlap_param_gather": True}
ONE_PROCESS: dict[str, Case] = {
    **{
        model: Case(model=model)
        for model in ("dense", "qk norm", "tied embeddings", "learned positions", "biases, GELU", "experts")
    },
    "packed": Case(packed=True),
    "by tokens": Case(max_tokens=120),
    "overlap": Case(optim=_OVERLAP),
}
"""Cases that ``gpucheck`` compares on a GPU and on the CPU."""
LAYOUTS: dict[str, Case] = {
    "TP2": Case(2, {"tp": 2}),
    "PP2": Case(2, {"pp": 2}),
    "TP2 with SP, packed": Case(2, {"tp": 2, "sequence_parallel": True}, packed=True),
    "DP2, distributed optimizer": Case(2, optim=_DISTRIBUTED),
    "PP2 x DP2, distributed optimizer with overlap": Case(4, {"pp": 2}, optim=_OVERLAP),
    "CP2": Case(2, {"cp": 2}),
    "EP2": Case(2, {"ep": 2}, "experts"),
    "TP2 x PP2 x DP2": Case(8, {"tp": 2, "pp": 2}),
    "EP2, decisive routers": Case(2, {"ep": 2}, DECISIVE),
}
"""Cases that ``gpucheck`` compares with one process over NCCL; ``tests/workers/parity.py`` has more of them."""


def prompt_columns(rows: int, prompt: int, vocabulary: int) -> dict[str, Tensor]:
    """Return prompts of different lengths, padded on the left: the same on every device and rank.

    Args:
        rows: number of prompts.
        prompt: tokens of the longest, at least 3.
        vocabulary: token ids are 2 up to this.

    Returns:
        ``input_ids`` and ``attention_mask``, int64 ``[rows, prompt]`` on the CPU.
    """
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(2, vocabulary, (rows, prompt), generator=generator)
    lengths = torch.randint(3, prompt + 1, (rows, 1), generator=generator)
    mask = (torch.arange(prompt) >= prompt - lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def batch_columns(rows: int, prompt: int, response: int, vocabulary: int) -> dict[str, Tensor]:
    """Return a batch as the trainer hands it to an update, with columns for the losses of policy and critic.

    Args:
        rows: number of rows.
        prompt: tokens of the longest prompt, at least 3.
        response: tokens of the longest response.
        vocabulary: token ids are 2 up to this.

    Returns:
        Columns ``[rows, prompt + response]`` and ``[rows, response]`` on the CPU, responses of different lengths.
    """
    start = prompt_columns(rows, prompt, vocabulary)
    generator = torch.Generator().manual_seed(6)
    responses = torch.randint(2, vocabulary, (rows, response), generator=generator)
    lengths = torch.randint(1, response + 1, (rows, 1), generator=generator)
    mask = (torch.arange(response) < lengths).long()

    def noise(scale: float) -> Tensor:
        return torch.randn(rows, response, generator=generator) * scale * mask

    return {
        "input_ids": torch.cat((start["input_ids"], responses * mask), 1),
        "attention_mask": torch.cat((start["attention_mask"], mask), 1),
        "responses": responses * mask,
        "response_mask": mask,
        "old_log_probs": -4.0 * mask + noise(0.2),
        "ref_log_prob": -4.0 * mask + noise(0.2),
        "advantages": noise(1.0),
        "values": noise(0.5),
        "returns": noise(1.0),
    }
