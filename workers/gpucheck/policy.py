"""A policy on this process's device, driven without Ray and without DataProto, which needs tensordict; and its sizes.

Part a has a small model. Parts b to d have the shape of a 1.7B model with rows of 8k tokens, or a tiny one of the same
kind.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, ModelConfig, OptimConfig, ParallelConfig, RolloutConfig
from workers.generate.rollout_protocol import Generated, Prompts
from workers.generate.sampling import Sampling, prompt_hashes, sample_seeds
from workers.train.batches import TokenBatch, response_batch
from workers.train.mini_batches import Division

PROMPT, RESPONSE = 24, 16
SIZES: dict[str, Any] = {
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

TOKENS = {"eos_token_id": 1, "pad_token_id": 0}
"""The ids that sampling needs."""


def actor_config(settings: Mapping[str, Any]) -> ActorConfig:
    """Return the configuration of an actor without clipping, from nested fields, without omegaconf.

    Args:
        settings: fields of ActorConfig, such as ``Case.settings`` returns, with ``rollout``.
    """
    types = {"model": ModelConfig, "parallel": ParallelConfig, "optim": OptimConfig, "rollout": RolloutConfig}
    nested: dict[str, Any] = {name: made(**settings.get(name, {})) for name, made in types.items()}
    return ActorConfig(**{"clip_ratio": 100.0, **settings, **nested})


@dataclass(frozen=True)
class Scale:
    """Sizes of the model, of its rows, and of the rows that are generated at once.

    Attributes:
        model: fields of ModelConfig.
        prompt: tokens of the longest prompt.
        response: tokens of the longest response.
        rows: rows that generate at once.
        decoded: tokens that each of them generates.
        stopped_s: seconds after which a transfer to a stopped process must fail.
    """

    model: dict[str, Any]
    prompt: int
    response: int
    rows: int
    decoded: int
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
    stopped_s=30.0,
)
TINY = Scale(
    model=SIZES | {"qk_layernorm": True, "tie_embeddings": True},
    prompt=24,
    response=40,
    rows=4,
    decoded=8,
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


class Policy:
    """An actor with its rollout on one rank; a context manager that destroys its process groups at exit.

    Args:
        config: the actor.
        role: of ActorRolloutRefWorker.
    """

    def __init__(self, config: ActorConfig, role: str = "actor_rollout") -> None:
        self.config = config
        self.worker = ActorRolloutRefWorker(config, role)
        self._size = config.update_size
        self.call("init_model")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.worker.context.destroy()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker as a group does."""
        with self.worker.call_context(method):
            return getattr(self.worker, method)(*arguments)

    def scores(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return log-probabilities, ``[rows, response]``, on the CPU."""
        with self.worker.call_context("compute_log_prob"):
            rows = self._rows(batch, ())
            scores = self.worker.scorer.score(self.worker.model, rows, self._size)
            assert scores is not None  # a single rank is the last stage
            return scores[0] * rows.mask

    def update(self, batch: Mapping[str, Tensor]) -> dict[str, float]:
        """Make one optimizer step with each mini-batch, and return the metrics."""
        worker = self.worker
        with worker.call_context("update_actor"):
            return worker.trainer.train(
                "update_actor",
                self._rows(batch, ("old_log_probs", "advantages")),
                loss=worker.loss,
                rules=worker.metrics(),
                micro_batch_size=self._size,
                division=Division(size=self.config.ppo_mini_batch_size, seed=self.config.seed),
            )

    def generate(self, batch: Mapping[str, Tensor], **settings: Any) -> Generated:
        """Generate responses to the prompts of the batch.

        Args:
            batch: all prompts differ.
            settings: of RolloutConfig.
        """
        worker, prompt = self.worker, self.config.rollout.prompt_length
        sampling = Sampling.of(self.config.rollout, TOKENS | settings)
        ids, attention = batch["input_ids"][:, :prompt], batch["attention_mask"][:, :prompt]
        hashes = prompt_hashes(ids, attention).tolist()
        seeds = sample_seeds(hashes, Counter(), n=sampling.n, seed=sampling.seed, call=0)
        with worker.call_context("generate_sequences"):
            assert worker.rollout is not None
            worker.rollout.update_weights(worker.generator.rollout_weights())
            generated = worker.rollout.generate(Prompts(ids, attention, seeds.view(len(ids), sampling.n)), sampling)
        assert generated is not None
        return generated

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the parameters by name."""
        for chunk in self.worker.model:
            for name, parameter in unwrap_model(chunk).named_parameters():
                yield name, parameter.detach()

    def _rows(self, batch: Mapping[str, Tensor], names: tuple[str, ...]) -> TokenBatch:
        return response_batch(
            batch,
            names,
            method="gpucheck",
            vocab_size=self.config.model.vocab_size,
            max_length=self.config.model.max_sequence_length,
            multiple=self.worker.batcher.length_multiple,
            temperature=self.config.rollout.temperature,
        )


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return how many seconds a call takes until the device has done its work, and its result."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return time.perf_counter() - started, result
