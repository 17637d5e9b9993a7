"""A policy on this process's device, driven without Ray; its sizes, and its batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch

from mcontroller import DataProto
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, ModelConfig, OptimConfig, ParallelConfig, RolloutConfig
from workers.gpucheck.cases import prompt_columns

_Config = TypeVar("_Config")
TOKENS = {"eos_token_id": 1, "pad_token_id": 0}
"""The ids that sampling needs."""
GB = 2**30


def actor_config(settings: Mapping[str, Any]) -> ActorConfig:
    """Return the configuration of an actor without clipping, from nested fields, without omegaconf.

    Args:
        settings: fields of ActorConfig, such as ``Case.settings`` returns, with ``rollout``.
    """
    rollout = RolloutConfig(**settings.get("rollout", {}))
    return role_config(ActorConfig, {"clip_ratio": 100.0, **settings, "rollout": rollout})


def role_config(kind: type[_Config], settings: Mapping[str, Any]) -> _Config:
    """Return a configuration of this kind from nested fields, without omegaconf."""
    types = {"model": ModelConfig, "parallel": ParallelConfig, "optim": OptimConfig}
    return kind(**{**settings, **{name: made(**settings.get(name, {})) for name, made in types.items()}})


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
        stopped_s: seconds after which a transfer to a stopped process must fail.
    """

    model: dict[str, Any]
    prompt: int
    response: int
    updated: int
    packed: int
    rows: int
    decoded: int
    stopped_s: float

    def config(
        self, implementation: str, seed: int = 1, transformer: Mapping[str, Any] | None = None, **rollout: Any
    ) -> ActorConfig:
        """Return an actor in bfloat16 with packed micro-batches.

        Args:
            implementation: of the layers.
            seed: of the weights.
            transformer: fields of Megatron's TransformerConfig.
            **rollout: fields of RolloutConfig.
        """
        model = self.model | {"dtype": "bfloat16", "transformer_impl": implementation, "seed": seed}
        model["transformer"] = dict(transformer or {})
        sizes = {
            "ppo_micro_batch_size": self.packed,
            "ppo_mini_batch_size": self.updated,
            "ppo_epochs": 1,
            "packed": True,
        }
        sizes["log_prob_chunk_tokens"] = self.prompt + self.response
        rollout = {"prompt_length": self.prompt, "response_length": self.response} | rollout
        return actor_config({**sizes, "model": model, "rollout": rollout, "optim": {"lr": 1e-5}})

    def batch(self) -> DataProto:
        """Return a batch for an update of rows of full length."""
        generator = torch.Generator().manual_seed(8)
        shape = self.updated, self.prompt + self.response
        ids = torch.randint(2, self.model["vocab_size"], shape, generator=generator)
        responses = ids[:, self.prompt :]
        columns = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "responses": responses,
            "response_mask": torch.ones_like(responses),
            "old_log_probs": torch.full(responses.shape, -8.0),
            "advantages": torch.randn(responses.shape, generator=generator),
        }
        return DataProto.from_dict(columns, meta_info=dict(TOKENS))

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
    stopped_s=30.0,
)
"""A model of the shape of Qwen3-1.7B."""

TINY_MODEL: dict[str, Any] = {
    "vocab_size": 509,
    "max_sequence_length": 64,
    "num_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "ffn_hidden_size": 256,
    "init_method_std": 0.05,
}
"""Fields of ModelConfig: widths that kernels of a GPU accept."""
TINY = Scale(
    model=TINY_MODEL | {"qk_layernorm": True, "tie_embeddings": True},
    prompt=24,
    response=40,
    updated=2,
    packed=1,
    rows=4,
    decoded=8,
    stopped_s=3.0,
)


class Policy:
    """An actor on one rank, in this process; a context manager that destroys its process groups at exit.

    Args:
        config: the actor.
        role: of ActorRolloutRefWorker.
    """

    def __init__(self, config: ActorConfig, role: str = "actor_rollout") -> None:
        self.worker = ActorRolloutRefWorker(config, role)
        self.call("init_model")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.worker.context.destroy()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker as a group does."""
        with self.worker.call_context(method):
            return getattr(self.worker, method)(*arguments)

    def scores(self, batch: DataProto) -> torch.Tensor:
        """Return log-probabilities, ``[rows, response]``."""
        return self.call("compute_log_prob", batch).batch["old_log_probs"]


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Return how many seconds a call takes until the device has done its work, and its result."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    result = call(*arguments)
    torch.cuda.synchronize()
    return time.perf_counter() - started, result


def fastest(call: Callable[[], Any], times: int = 3) -> tuple[float, Any]:
    """Return the seconds of the fastest of several calls, and the result of the last."""
    results = [timed(call) for _ in range(times)]
    return min(seconds for seconds, _ in results), results[-1][1]
