from __future__ import annotations

import importlib.util

import pytest

from mcontroller.ppo.datasets.config import DatasetConfig
from mcontroller.ppo.datasets.sources import load_records
from mcontroller.ppo.rewards.functions import exact_match, math_verify, reasoning_gym

needs_math = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="the extra math: no math-verify"
)


def test_the_scorer_of_a_task_scores_right_partial_and_wrong_answers():
    config = DatasetConfig(source="reasoning_gym", task="chain_sum", options={"min_digits": 2}, size=20)
    rows = load_records(config, "data.train").rows
    assert all(reasoning_gym(row["answer"], row["entry"]) == {"score": 1.0, "accuracy": 1.0} for row in rows)
    assert all(reasoning_gym("no number", row["entry"])["accuracy"] == 0.0 for row in rows)
    partial = reasoning_gym(rows[0]["answer"] + " + ", rows[0]["entry"])
    assert 0.0 < partial["score"] < 1.0 and partial["accuracy"] == 0.0


def test_an_exact_match_ignores_spaces_around_the_texts():
    assert exact_match(" 12\n", "12") == 1.0 and exact_match("12", 12) == 1.0 and exact_match("12.", "12") == 0.0


@needs_math
@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"so the result is $\boxed{\frac{1}{2}}$", "0.5", 1.0),
        ("The answer is $1/2$.", r"$\frac{1}{2}$", 1.0),
        ("The answer is 3", "4", 0.0),
        ("no idea", "4", 0.0),
    ],
)
def test_equal_expressions_are_right_however_they_are_written(response, answer, score):
    assert math_verify(response, answer) == score
