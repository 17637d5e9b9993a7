"""A reward model from pairs of responses (Bradley-Terry, as in Ouyang et al., 2022, arXiv:2203.02155, equation 1).

The score of a response is the output of a value head at its last token, and the loss of a pair is
``-log sigmoid(margin)``, with ``margin = score(chosen) - score(rejected)``. Its gradient is ``-sigmoid(-margin)`` times
the difference of the gradients of both scores: a step computes the margins with the present weights, and trains each
score with its weight.
The role ``reward_model`` of a run then loads the checkpoint.

python -m examples.reward_model
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from examples.loops.task import COMMON, DIGITS, FIRST_DIGIT, LENGTH, problems, responses, right_answers
from mcontroller import ClassWithInitArgs, DataProto, LocalWorkerGroup
from workers import CriticConfig, CriticWorker, RewardConfig, RewardModelWorker, TokenBatch, load_config, masked_sum

STEPS, PAIRS = 40, 64


class PairTrainer(CriticWorker):
    """A critic whose values are those of the tokens themselves, with a weight for each in place of a return."""

    def forward_step(self, model: nn.Module, rows: TokenBatch) -> Tensor:
        rows.predictors = (rows.predictors + 1).clamp(max=rows.tokens.size(1) - 1)
        return super().forward_step(model, rows)

    def loss(self, rows: TokenBatch, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        count = rows.mask.sum()
        return masked_sum(-rows.columns["returns"] * output, rows.mask), count, {"tokens": count}

    def metrics(self) -> dict[str, Any]:
        return {}  # of what loss reports, beside the count


def pairs(seed: int) -> DataProto:
    """Return right responses, and then as many drawn ones."""
    prompts = problems(PAIRS, seed)
    drawn = torch.randint(DIGITS, (PAIRS, LENGTH), generator=torch.Generator().manual_seed(seed)) + FIRST_DIGIT
    return DataProto.concat([responses(prompts, right_answers(prompts)), responses(prompts, drawn)])


def margins(scores: Tensor) -> Tensor:
    """Return how far the chosen response is above the rejected one, by pair; ``scores`` is ``[rows, LENGTH]``."""
    chosen, rejected = scores[:, -1].split(PAIRS)
    return chosen - rejected


def main() -> float:
    """Train, and return the share of new pairs whose right response the role ``reward_model`` scores higher."""
    sizes = {"model": COMMON["model"], "ppo_mini_batch_size": 2 * PAIRS, "ppo_micro_batch_size": 2 * PAIRS}
    config = load_config(CriticConfig, sizes | {"optim": COMMON["optim"]}, {})
    trainer = LocalWorkerGroup(ClassWithInitArgs(PairTrainer, config), name_prefix="trainer")
    trainer.init_model()
    for step in range(STEPS):
        batch = pairs(seed=step)
        scores = trainer.compute_values(batch).batch["values"]
        margin = margins(scores)
        weights = torch.zeros_like(scores)
        weights[:, -1] = torch.cat((torch.sigmoid(-margin), -torch.sigmoid(-margin)))
        trainer.update_critic(batch.union(DataProto.from_dict({"values": scores, "returns": weights})))
        print(f"step {step}: loss {-float(logsigmoid(margin).mean()):.3f}")

    reward = load_config(RewardConfig, {"model": COMMON["model"]}, {})
    scorer = LocalWorkerGroup(ClassWithInitArgs(RewardModelWorker, reward), name_prefix="reward_model")
    scorer.init_model()
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_checkpoint(folder)
        scorer.load_checkpoint(folder)
    right = float((margins(scorer.compute_rm_score(pairs(seed=1000)).batch["rm_scores"]) > 0).float().mean())
    print(f"the reward model prefers the right response in {right:.0%} of new pairs")
    return right


if __name__ == "__main__":
    main()
