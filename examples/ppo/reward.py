"""The reward: the score of reasoning-gym's scorer for the generated text."""

from __future__ import annotations

from typing import Any

from examples.ppo.tokenizer import CharTokenizer
from mcontroller.data.protocol import DataProto
from mcontroller.ppo import Reward, outcome_scores
from mcontroller.ppo.data import columns

__all__ = ["ReasoningGymReward"]


class ReasoningGymReward:
    """Score each response with ``scorer.score_answer``, on its last token; ``accuracy`` is 1 for a full score.

    Reads ``responses`` and ``response_mask`` ``[rows, response]``, and the column ``entry`` with the problem.
    """

    def __init__(self, scorer: Any, tokenizer: CharTokenizer) -> None:
        self.scorer = scorer
        self.tokenizer = tokenizer

    def __call__(self, batch: DataProto) -> Reward:
        texts = self.texts(batch)
        entries = batch.non_tensor_batch["entry"]
        scores = [self.scorer.score_answer(text, entry) for text, entry in zip(texts, entries, strict=True)]
        accuracy = [float(score == 1.0) for score in scores]
        (mask,) = columns(batch, "response_mask")
        return Reward(outcome_scores(scores, mask), {"accuracy": accuracy})

    def texts(self, batch: DataProto) -> list[str]:
        """Return the generated texts, up to the end-of-sequence token."""
        responses, mask = columns(batch, "responses", "response_mask")
        rows = zip(responses.tolist(), mask.sum(1).tolist(), strict=True)
        return [self.tokenizer.decode(row[:length]) for row, length in rows]
