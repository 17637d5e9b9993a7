"""Validation: responses to held-out problems, and statistics of their scores."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from mcontroller.ppo.config import ValidationConfig
from mcontroller.ppo.data import Dataset, check_rows, in_order
from mcontroller.ppo.rewards.reward import Reward, joined
from mcontroller.ppo.step import PPOStep
from mcontroller.ppo.summary import reward_metrics

HELD_OUT = "held_out"
"""Prefix of the metrics of held-out problems."""


@dataclass(frozen=True)
class Evaluation:
    """Held-out problems, and how the responses to them are sampled.

    Attributes:
        problems: the problems.
        sampling: of the responses.
    """

    problems: Dataset
    sampling: ValidationConfig


def evaluations_by_prefix(
    held_out: Dataset | None, others: Mapping[str, Evaluation], sampling: ValidationConfig
) -> dict[str, Evaluation]:
    """Return the evaluations of a run by the prefix of their metrics.

    Args:
        held_out: problems whose metrics begin with ``held_out/``.
        others: evaluations by name, whose metrics begin with ``held_out/<name>/``.
        sampling: of the responses to ``held_out``.

    Raises:
        DataError: the first row of a data set lacks the tensors that prompts need.
    """
    check_rows(val_dataset=held_out, **{f"evaluations[{name!r}]": each.problems for name, each in others.items()})
    first = {} if held_out is None else {HELD_OUT: Evaluation(held_out, sampling)}
    return first | {f"{HELD_OUT}/{name}": each for name, each in others.items()}


def validate(step: PPOStep, evaluations: Mapping[str, Evaluation]) -> dict[str, float]:
    """Return the statistics of the scores of responses to held-out problems; see ``validation_metrics``.

    Args:
        step: generates and scores.
        evaluations: by the prefix of their metrics.
    """
    metrics: dict[str, float] = {}
    for prefix, evaluation in evaluations.items():
        rewards = []
        for batch in in_order(evaluation.problems, step.config.data.val_batch_size):
            step.weights.update()
            with step.stages("held-out", step.groups.rollout.generate_sequences):
                responses, asked = step.generate(batch, **evaluation.sampling.sampling())
            with step.stages.overlapping() as start:
                rewards.append(step.scored(responses, asked, start, held_out=True)[1])
        metrics |= validation_metrics(joined(rewards), evaluation.sampling.n, prefix)
    return metrics


def validation_metrics(reward: Reward, n: int, prefix: str = HELD_OUT) -> dict[str, float]:
    """Return statistics of the scores of ``n`` responses to each problem, under ``held_out/``.

    ``score`` is the mean over all responses. With more than one response, ``mean_at_<n>`` is that mean as well,
    ``best_at_<n>`` the mean over problems of the best score, and, if the reward has ``answers``, ``maj_at_<n>`` the
    mean over problems of the score of the most frequent answer, of several the one that occurs first. Responses without
    a score do not count.

    Args:
        reward: of the responses; those to one problem are neighbors.
        n: responses to each problem.
        prefix: of the names of the metrics, in place of ``held_out``.
    """
    metrics = reward_metrics(prefix, reward)
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
        metrics |= {f"{prefix}/mean_at_{n}": metrics[f"{prefix}/score"], f"{prefix}/best_at_{n}": fmean(best)}
    if voted:
        metrics[f"{prefix}/maj_at_{n}"] = fmean(voted)
    return metrics
