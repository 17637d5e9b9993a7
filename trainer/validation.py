"""Validation: responses to held-out problems, and statistics of their scores."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from mcontroller.config.fields import check_unused
from mcontroller.data.meta import united
from trainer.config import PPOConfig, ValidationConfig
from trainer.data.stream import Dataset, check_rows, in_order
from trainer.metrics import Metrics, over_ranks
from trainer.rewards.reward import Reward, joined
from trainer.step import PPOStep
from trainer.summary import reward_metrics
from workers.columns import HELD_OUT_BATCH

HELD_OUT, VALIDATION = "held_out", "validation"
"""Prefixes of the metrics of held-out problems: of the scores, and of what the rollout reports."""


@dataclass(frozen=True)
class Evaluation:
    """Held-out problems, and how the responses to them are sampled.

    Attributes:
        problems: the problems.
        sampling: of the responses.
    """

    problems: Dataset
    sampling: ValidationConfig


def check_validation(config: PPOConfig, *, is_validated: bool) -> None:
    """Raise ConfigError if a setting needs held-out problems and there are none."""
    if not is_validated:
        names, reason = (
            ("keep_best", *(("test_freq",) if config.trainer.test_freq > 0 else ())),
            "without held-out problems",
        )
        check_unused(config.trainer, names, "trainer.", reason)
        check_unused(config.data, ("val_batch_size",), "data.", reason)
        check_unused(config, ("validation",), "", reason)


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
    check_rows(
        val_dataset=held_out, **{f"evaluations[{name!r}]": evaluation.problems for name, evaluation in others.items()}
    )
    first = {} if held_out is None else {HELD_OUT: Evaluation(held_out, sampling)}
    return first | {f"{HELD_OUT}/{name}": evaluation for name, evaluation in others.items()}


def validate(step: PPOStep, evaluations: Mapping[str, Evaluation]) -> dict[str, float]:
    """Return the statistics of the scores of responses to held-out problems; see ``validation_metrics``.

    What the rollout reports, such as failed episodes, is under ``validation/``.

    Args:
        step: generates and scores.
        evaluations: by the prefix of their metrics.
    """
    metrics, generation = dict[str, float](), Metrics()
    for prefix, evaluation in evaluations.items():
        rewards = []
        for number, batch in enumerate(in_order(evaluation.problems, step.config.data.val_batch_size)):
            step.weights.update()
            with step.stages("held-out", step.groups.rollout.generate_sequences):
                generated = step.generate(batch, **evaluation.sampling.sampling(), **{HELD_OUT_BATCH: number})
                responses, problem_columns = generated.responses, generated.problem_columns
            generation.add(over_ranks(responses.meta_info.pop("metrics", {})), weight=len(responses))
            with step.stages.overlapping() as start:
                rewards.append(step.call_rewards(responses, problem_columns, start, held_out=True)[1])
        metrics = united(metrics, validation_metrics(joined(rewards), evaluation.sampling.n, prefix))
    return united(metrics, {f"{VALIDATION}/{name}": value for name, value in generation.take().items()})


def held_out_metrics(evaluations: Mapping[str, Evaluation], reported: Iterable[str]) -> set[str]:
    """Return the names of the metrics that validation can have, see ``validation_metrics``, without majority votes.

    Args:
        evaluations: by the prefix of their metrics.
        reported: the columns of the reward.
    """
    spread = {"unscored", *(f"{name}{end}" for name in ("score", *reported) for end in ("", "_std"))}
    names = set[str]()
    for prefix, evaluation in evaluations.items():
        n = evaluation.sampling.n
        several = {f"mean_at_{n}", f"best_at_{n}"} if n > 1 else set()
        names |= {f"{prefix}/{name}" for name in spread | several | {"score_min", "score_max"}}
    return names


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
