"""A policy on this process's device, driven without Ray and without DataProto, which needs tensordict.

The batch, the prompts and the initial weights are the same in every process and on every device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, ModelConfig, OptimConfig, ParallelConfig, RolloutConfig
from workers.generate.rollout_protocol import Generated, Prompts
from workers.generate.sampling import Sampling, prompt_hashes, sample_seeds
from workers.train.batches import TokenBatch, response_batch
from workers.train.micro_batches import MicroBatchSize

__all__ = ["MODELS", "PROMPT", "RESPONSE", "ROWS", "VARIANTS", "VOCABULARY", "Policy", "actor_config", "ppo_columns"]

PROMPT, RESPONSE, VOCABULARY, ROWS = 24, 16, 509, 12
"""Tokens of a prompt and of a response, token ids, and rows of the batch."""

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_sequence_length": 64,
    "num_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "ffn_hidden_size": 256,
    "init_method_std": 0.05,
}

MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "qk norm": {"qk_layernorm": True},
    "learned positions": {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "gated_linear_unit": False,
        "activation": "gelu",
        "add_bias_linear": True,
    },
    "experts": {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 64},
    "tied embeddings": {"tie_embeddings": True},
}
"""The kinds of models, as fields of ModelConfig."""

VARIANTS: dict[str, dict[str, Any]] = {
    "packed": {"packed": True},
    "distributed optimizer": {"optim": {"distributed_optimizer": True}},
    "overlap": {"optim": {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}},
}
"""Settings that do not change the result: the reference of each is the dense model without it."""

_TOKENS = {"eos_token_id": 1, "pad_token_id": 0}


def actor_config(
    model: Mapping[str, Any], options: Mapping[str, Any] | None = None, parallel: Mapping[str, Any] | None = None
) -> ActorConfig:
    """Return the configuration of a small actor.

    Args:
        model: fields of ModelConfig that differ from those of the dense model.
        options: fields of ActorConfig; ``optim`` and ``rollout`` are fields of theirs.
        parallel: sizes of the axes.
    """
    further = dict(options or {})
    optim = {"lr": 1e-3, "eps": 1e-4} | further.pop("optim", {})
    rollout = {"prompt_length": PROMPT, "response_length": RESPONSE, "seed": 3} | further.pop("rollout", {})
    return ActorConfig(
        model=ModelConfig(**(_BASE | dict(model))),
        parallel=ParallelConfig(**(parallel or {})),
        optim=OptimConfig(**optim),
        rollout=RolloutConfig(**rollout),
        **({"ppo_mini_batch_size": 8, "ppo_micro_batch_size": 3} | further),
    )


def ppo_columns(rows: int = ROWS, prompt: int = PROMPT, response: int = RESPONSE) -> dict[str, Tensor]:
    """Return the columns of a PPO batch on the CPU: rows of unequal length, seeded."""
    generator = torch.Generator().manual_seed(6)
    lengths = torch.randint(1, response + 1, (rows, 1), generator=generator)
    prompts = torch.randint(min(3, prompt), prompt + 1, (rows, 1), generator=generator)
    attention = (torch.arange(prompt) >= prompt - prompts).long()
    mask = (torch.arange(response) < lengths).long()
    whole = torch.cat((attention, mask), 1)
    ids = torch.randint(2, VOCABULARY, (rows, prompt + response), generator=generator) * whole
    noise = torch.randn(2, rows, response, generator=generator) * mask
    return {
        "input_ids": ids,
        "attention_mask": whole,
        "responses": ids[:, prompt:],
        "response_mask": mask,
        "old_log_probs": -6.0 * mask + 0.2 * noise[0],
        "advantages": noise[1],
    }


class Policy:
    """An actor with its rollout on this rank; a context manager that destroys its process groups at exit.

    Args:
        config: the actor.
        role: of ActorRolloutRefWorker.
    """

    def __init__(self, config: ActorConfig, role: str = "actor_rollout") -> None:
        self.config = config
        self.worker = ActorRolloutRefWorker(config, role)
        with self.worker.call_context("init_model"):
            self.worker.init_model()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.worker.context.destroy()

    def scores(self, batch: Mapping[str, Tensor]) -> Tensor | None:
        """Return log-probabilities of this rank's rows, ``[rows, response]``, on the CPU; None off the last stage."""
        with self.worker.call_context("compute_log_prob"):
            rows = self._rows(batch, ())
            scores = self.worker.score(self.worker.model, rows, MicroBatchSize(self.config.ppo_micro_batch_size))
            return None if scores is None else scores[0] * rows.mask

    def update(self, batch: Mapping[str, Tensor]) -> dict[str, float]:
        """Make one PPO update on this rank's rows, and return its metrics."""
        worker = self.worker
        with worker.call_context("update_actor"):
            return worker.train(
                "update_actor",
                self._rows(batch, ("old_log_probs", "advantages")),
                loss=worker.loss,
                rules=worker.metrics(),
                mini_batch_size=self.config.ppo_mini_batch_size,
                micro_batch_size=MicroBatchSize(self.config.ppo_micro_batch_size),
                shuffle_seed=self.config.seed,
            )

    def generate(self, batch: Mapping[str, Tensor], **settings: Any) -> Generated | None:
        """Generate responses to the prompts of the batch; None on ranks that do not return them.

        Args:
            batch: the rows of this rank; all prompts of all ranks differ.
            settings: of RolloutConfig.
        """
        worker, prompt = self.worker, self.config.rollout.prompt_length
        sampling = Sampling.of(self.config.rollout, _TOKENS | settings)
        ids, attention = batch["input_ids"][:, :prompt], batch["attention_mask"][:, :prompt]
        hashes = prompt_hashes(ids, attention).tolist()
        seeds = sample_seeds(hashes, Counter(), n=sampling.n, seed=sampling.seed, call=0)
        with worker.call_context("generate_sequences"):
            assert worker.rollout is not None
            worker.rollout.update_weights(worker.rollout_weights())
            return worker.rollout.generate(Prompts(ids, attention, seeds.view(len(ids), sampling.n)), sampling)

    def save(self, path: str) -> None:
        """Save a checkpoint under ``path``."""
        with self.worker.call_context("save_checkpoint"):
            self.worker.save_checkpoint(path, 1)

    def load(self, path: str) -> None:
        """Load the checkpoint that ``save`` wrote, from any device."""
        with self.worker.call_context("load_checkpoint"):
            self.worker.load_checkpoint(path)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the parameters of this rank by name."""
        for index, chunk in enumerate(self.worker.model):
            for name, parameter in unwrap_model(chunk).named_parameters():
                yield f"{index}.{name}", parameter.detach()

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the parameters of this rank by name, float32 on the CPU."""
        return {name: parameter.float().cpu() for name, parameter in self.parameters()}

    def size(self) -> int:
        """Return the number of parameters of this rank."""
        return sum(math.prod(parameter.shape) for _, parameter in self.parameters())

    def _rows(self, batch: Mapping[str, Tensor], names: tuple[str, ...]) -> TokenBatch:
        return response_batch(
            batch,
            names,
            method="gpucheck",
            vocab_size=self.config.model.vocab_size,
            max_length=self.config.model.max_sequence_length,
            multiple=self.worker.sequence_multiple,
            temperature=self.config.rollout.temperature,
        )
