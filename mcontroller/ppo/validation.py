"""Validation: responses to held-out problems, and statistics of their scores."""

from __future__ import annotations

import math
from collections import Counter
from statistics import fmean

from mcontroller.config.fields import check_unused
from mcontroller.ppo.config import PPOConfig
from mcontroller.ppo.data import Dataset, in_order
from mcontroller.ppo.metrics import Metrics, of_ranks, united
from mcontroller.ppo.rewards.reward import Reward, joined
from mcontroller.ppo.step import PPOStep
from mcontroller.ppo.summary import reward_metrics


def check_validation(config: PPOConfig, problems: Dataset | None) -> None:
    """Raise ConfigError if a setting needs held-out problems and there are none."""
    if problems is None:
        names = ("keep_best", *(("test_freq",) if config.trainer.test_freq > 0 else ()))
        check_unused(config.trainer, names, "trainer.", "without held-out problems")


def validate(step: PPOStep, problems: Dataset) -> dict[str, float]:
    """Return the statistics of the scores of responses to held-out problems; see ``validation_metrics``.

    What the rollout reports, such as failed episodes, is under ``validation/``.
    """
    config, rewards, generation = step.config.validation, [], Metrics()
    for batch in in_order(problems, step.config.data.val_batch_size):
        step.weights.update()
        with step.stages("held-out", step.groups.rollout.generate_sequences):
            responses, asked = step.generate(batch, **config.sampling())
        generation.add(of_ranks(responses.meta_info.pop("metrics", {})), weight=len(responses))
        with step.stages.overlapping() as start:
            rewards.append(step.scored(responses, asked, start, held_out=True)[1])
    of_generation = {f"validation/{name}": value for name, value in generation.take().items()}
    return united(validation_metrics(joined(rewards), config.n), of_generation)


def validation_metrics(reward: Reward, n: int) -> dict[str, float]:
    """Return statistics of the scores of ``n`` responses to each problem, under ``held_out/``.

    ``score`` is the mean over all responses. With more than one response, ``mean_at_<n>`` is that mean as well,
    ``best_at_<n>`` the mean over problems of the best score, and, if the reward has ``answers``, ``maj_at_<n>`` the
    mean over problems of the score of the most frequent answer, of several the one that occurs first. Responses without
    a score do not count.

    Args:
        reward: of the responses; those to one problem are neighbors.
        n: responses to each problem.
    """
    metrics = reward_metrics("held_out", reward)
    if n == 1:
        return metrics
    best, voted, scores = [], [], reward.row_scores().view(-1, n).tolist()
    for problem, of_problem in enumerate(scores):
        rows = [row for row in range(n) if not math.isnan(of_problem[row])]
        if not rows:
            continue
        best.append(max(of_problem[row] for row in rows))
        if reward.answers is not None:
            answers = [reward.answers[problem * n + row] for row in rows]
            voted.append(of_problem[rows[answers.index(Counter(answers).most_common(1)[0][0])]])
    if best:
        metrics |= {f"held_out/mean_at_{n}": metrics["held_out/score"], f"held_out/best_at_{n}": fmean(best)}
    if voted:
        metrics[f"held_out/maj_at_{n}"] = fmean(voted)
    return metrics
