"""The course of one model, whose results do not depend on the device: scores, tokens, updates."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workers.generate.rollout_protocol import Generated
from workers.gpucheck.policy import MODELS, RESPONSE, VARIANTS, Policy, actor_config, ppo_columns

__all__ = ["UPDATES", "Case", "Outcome", "can_save", "cases", "continue_course", "run_course"]

UPDATES = 2
"""PPO updates of a course; each makes two optimizer steps."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model in a dtype, with settings that do not change the result.

    Attributes:
        model: key of ``MODELS``.
        dtype: ``float32`` or ``bfloat16``.
        variant: key of ``VARIANTS``; None for none.
        implementation: ``local`` or ``transformer_engine``.
    """

    model: str
    dtype: str = "float32"
    variant: str | None = None
    implementation: str = "local"

    def __str__(self) -> str:
        parts = [self.model, self.dtype]
        parts += [self.variant] if self.variant else []
        parts += ["TE"] if self.implementation != "local" else []
        return " ".join(parts)

    @property
    def reference(self) -> Case:
        """The case that the CPU computes."""
        return Case(self.model, self.dtype)

    @property
    def precision(self) -> str:
        """The key of ``TOLERANCES``."""
        uses_tf32 = self.dtype == "float32" and self.implementation == "transformer_engine"
        return "tf32" if uses_tf32 else self.dtype

    def policy(self, parallel: Mapping[str, int] | None = None, **model: Any) -> Policy:
        """Return the policy of this case, with the initial weights.

        Args:
            parallel: sizes of the axes.
            model: further fields of ModelConfig.
        """
        fields = MODELS[self.model] | {"dtype": self.dtype, "transformer_impl": self.implementation} | model
        options = VARIANTS[self.variant] if self.variant else {}
        return Policy(actor_config(fields, options, parallel))


def cases(implementations: list[str], *, smallest: bool) -> list[Case]:
    """Return the cases to check.

    Args:
        implementations: layers that can be used here.
        smallest: whether one model is enough.
    """
    models = ["dense"] if smallest else list(MODELS)
    every = [
        Case(model, dtype, implementation=implementation)
        for implementation in implementations
        for model in models
        for dtype in ("float32", "bfloat16")
    ]
    variants = [] if smallest else [Case("dense", variant=variant) for variant in VARIANTS]
    return every + variants


@dataclass(frozen=True)
class Outcome:
    """The results of a course, on the CPU.

    Attributes:
        scores: log-probabilities with the initial weights, ``[rows, response]``.
        greedy: the most probable tokens, ``[rows, response]``.
        sampled: two sampled responses to each prompt, ``[2 * rows, response]``.
        drift: the mean difference between the log-probabilities of greedy tokens that generation and scoring return.
        metrics: of each update.
        weights: the parameters after the updates, by name.
        after: log-probabilities after the updates, ``[rows, response]``.
    """

    scores: Tensor
    greedy: Tensor
    sampled: Tensor
    drift: float
    metrics: list[dict[str, float]]
    weights: dict[str, Tensor]
    after: Tensor


def can_save() -> bool:
    """Return whether checkpoints can be saved here: Megatron-Core needs psutil for it, and does not install it."""
    return importlib.util.find_spec("psutil") is not None


def run_course(case: Case, checkpoint: Path) -> Outcome:
    """Score, generate and train on one rank.

    Args:
        case: the model, with its initial weights.
        checkpoint: a new folder; the state after the first update is saved in it, if ``can_save``.
    """
    batch = ppo_columns()
    with case.policy() as policy:
        scores = policy.scores(batch)
        greedy = policy.generate(batch, do_sample=False)
        sampled = policy.generate(batch, top_p=0.9, top_k=50, n=2)
        assert scores is not None and greedy is not None and sampled is not None  # one rank
        drift = _drift(policy, batch, greedy)
        metrics = [policy.update(batch)]
        if can_save():
            policy.save(str(checkpoint))
        metrics += [policy.update(batch) for _ in range(UPDATES - 1)]
        after = policy.scores(batch)
        assert after is not None
        weights = policy.weights()
    return Outcome(scores, greedy.responses.cpu(), sampled.responses.cpu(), drift, metrics, weights, after)


def _drift(policy: Policy, batch: Mapping[str, Tensor], greedy: Generated) -> float:
    """The mean difference between the log-probabilities of tokens that generation and scoring return."""
    mask = greedy.mask.cpu()
    attention = torch.cat((batch["attention_mask"][:, :-RESPONSE], mask), 1)
    responses = greedy.responses.cpu() * mask
    generated = {
        "input_ids": torch.cat((batch["input_ids"][:, :-RESPONSE], responses), 1),
        "attention_mask": attention,
        "responses": responses,
        "response_mask": mask,
    }
    rescored = policy.scores(generated)
    assert rescored is not None
    return float(((rescored - greedy.log_probs.cpu()) * mask).abs().sum() / mask.sum())


def continue_course(case: Case, checkpoint: Path) -> Tensor:
    """Load the checkpoint of a course, make the remaining updates, and return the scores: ``Outcome.after``."""
    with case.policy() as policy:
        policy.load(str(checkpoint))
        for _ in range(UPDATES - 1):
            policy.update(ppo_columns())
        scores = policy.scores(ppo_columns())
    assert scores is not None  # a single rank is the last stage
    return scores
