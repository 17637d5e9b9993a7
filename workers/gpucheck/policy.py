"""A policy on this process's device, driven without Ray and without DataProto, which needs tensordict."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
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

__all__ = ["TOKENS", "Policy", "actor_config", "timed"]

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
