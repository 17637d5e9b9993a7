"""Reward functions in processes: arguments, weights, failures and deadlines."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from mcontroller.data.batch import DataProto
from mcontroller.errors import ConfigError, DataError
from trainer.rewards.config import RewardFunctionConfig, RewardsConfig
from trainer.rewards.configured import FunctionRewards
from trainer.rewards.reward import outcome_scores

SCORES = Path(__file__).with_name("scores.py")
PROCESSES = pytest.mark.processes


class Letters:
    def decode(self, ids):
        return "".join(map(chr, ids))


def batch(responses, answers=None, **columns):
    """A batch as the trainer makes it, one token per character, with columns of the data set."""
    width = max(map(len, responses))
    ids = [[*map(ord, text), *[0] * (width - len(text))] for text in responses]
    mask = [[1] * len(text) + [0] * (width - len(text)) for text in responses]
    rows = range(len(responses))
    objects = {
        "prompt": np.array([f"prompt {row}" for row in rows], dtype=object),
        "answer": np.array(answers or [None] * len(responses), dtype=object),
        "record": np.array([{name: values[row] for name, values in columns.items()} for row in rows], dtype=object),
    }
    return DataProto.from_dict({"responses": torch.tensor(ids), "response_mask": torch.tensor(mask)}, objects)


def rewards(timeout_s=20.0, failed_score=0.0, **functions):
    """Rewards of functions in scores.py: each a name, or a name with other fields."""
    configured = {}
    for name, given in functions.items():
        function, fields = (given, {}) if isinstance(given, str) else given
        configured[name] = RewardFunctionConfig(f"{SCORES}:{function}", **fields)
    return FunctionRewards(RewardsConfig(configured, 2, timeout_s, failed_score), Letters())


@PROCESSES
def test_scores_are_a_weighted_sum_with_a_column_for_each_function_and_value():
    functions = rewards(right="right", level=("with_values", {"weight": 0.5}))
    reward = functions(batch(["4", "no"], ["4", "5"], level=[1, 3]))
    functions.close()
    assert reward.token_level_scores.tolist() == [[2.0, 0.0], [0.0, 3.0]]
    assert reward.columns == {
        "right": [1.0, 0.0],
        "level": [2.0, 6.0],
        "level/length": [1.0, 2.0],
        "reward_failed": [0.0, 0.0],
    }


@PROCESSES
def test_failures_are_reported_with_their_sample_and_do_not_lose_the_batch(caplog):
    functions = rewards(timeout_s=2.0, some="sometimes", all=("lengths", {"batch": True, "options": {"offset": 10}}))
    with caplog.at_level(logging.WARNING):
        reward = functions(batch(["fine", "raise", "hang", "die", "text", "nan", "none", "fine"]))
    functions.close()
    some = reward.columns["some"]
    assert some[:6] + some[7:] == [1.0, 0, 0, 0, 0, 0, 1.0] and math.isnan(some[6])
    assert reward.columns["all"] == [14.0, 15, 14, 13, 14, 13, 14, 14]
    assert reward.columns["reward_failed"] == [0, 1, 1, 1, 1, 1, 0, 0] and reward.scored == [True] * 8
    assert reward.token_level_scores.sum(1).tolist() == [15.0, 15, 14, 13, 14, 13, 14, 15]
    text = caplog.text
    assert "reward function 'some' failed for 5 of 8 samples (score 0.0)" in text
    assert "Sample 1: KeyError: 'no such thing'" in text and "scores.py, line" in text and "prompt 'prompt 1'" in text
    assert "Sample 2: it did not return within 2 s" in text and "ended with exit code 7" in text


@PROCESSES
def test_what_a_function_raises_costs_its_own_sample(caplog):
    """An async function that exits, is cancelled or has a timeout of its own; a value of a batch that is no number."""
    functions = rewards(slow="slow", huge=("huge", {"batch": True}), none="none_beside")
    with caplog.at_level(logging.WARNING):
        reward = functions(batch(["a", "exit", "cancel", "timeout", "b"]))
    functions.close()
    assert reward.columns["slow"] == [1.0, 0, 0, 0, 1.0] and reward.columns["huge"] == [1.0, 0, 0, 0, 1.0]
    assert reward.columns["none"] == [1.0] * 5 and reward.columns["none/length"] == [1.0, 4, 6, 7, 1]
    assert "none/depth" not in reward.columns
    assert "Sample 3: TimeoutError: the judge did not answer" in caplog.text and "exit code" not in caplog.text


@PROCESSES
def test_a_value_with_the_name_of_another_column_is_rejected_in_the_trial():
    sample = {"prompt": "1 + 1 =", "response": "2", "answer": "2"}
    for name, functions in {"response": {"mine": "hides_the_response"}, "length": {"length": "none_beside"}}.items():
        scoring = rewards(**functions)
        with pytest.raises(DataError) as caught:
            scoring.check({"data.train": [sample]})
        scoring.close()
        assert (caught.value.function, caught.value.column) == (next(iter(functions)), name)


@PROCESSES
def test_a_batch_that_was_started_early_has_the_same_scores():
    functions = rewards(right="right")
    given = batch(["4", "no"], ["4", "5"])
    started = functions.start(given)
    assert functions(batch(["5", "5"], ["4", "5"])).columns["right"] == [0.0, 1.0]
    assert started().columns["right"] == [1.0, 0.0]
    functions.close()


@PROCESSES
def test_closing_ends_a_function_that_hangs():
    functions = rewards(timeout_s=100.0, some="sometimes")
    started = time.monotonic()
    functions.start(batch(["fine", "hang"]))
    functions.close()
    assert time.monotonic() - started < 60.0


@PROCESSES
def test_async_functions_run_together_and_are_cancelled_at_the_deadline():
    functions = rewards(timeout_s=4.0, failed_score=None, slow="slow")
    functions(batch(["a"]))
    started = time.monotonic()
    reward = functions(batch([*"abcdefghijklmnop", "hang"]))
    functions.close()
    assert reward.columns["slow"][:16] == [1.0] * 16 and math.isnan(reward.columns["slow"][16])
    assert reward.scored == [True] * 16 + [False] and reward.token_level_scores[16].tolist() == [0.0] * 4
    assert time.monotonic() - started < 16 * 0.3 / 2 + 4.0  # one after the other takes 2.4 s in each process


@PROCESSES
@pytest.mark.parametrize(("function", "batched"), [("returns_text", False), ("too_few", True), ("returns_text", True)])
def test_a_function_that_fails_for_every_sample_ends_the_run_with_the_reason(function, batched):
    scoring = rewards(mine=(function, {"batch": batched}))
    with pytest.raises(DataError) as caught:
        scoring(batch(["a", "b"]))
    assert caught.value.function == "mine"
    scoring.close()


@PROCESSES
def test_a_trial_reports_a_missing_argument_before_the_start():
    functions = rewards(mine="with_values")
    with pytest.raises(DataError) as caught:
        functions.check({"data.train": [{"prompt": "1 + 1 =", "response": "2", "answer": "2"}]})
    assert (caught.value.function, caught.value.argument) == ("mine", "level")
    functions.check({"data.train": [{"prompt": "1 + 1 =", "response": "2", "answer": "2", "level": 1}]})
    functions.close()


@pytest.mark.parametrize(
    "path",
    [
        "no_colon",
        f"{SCORES}:rihgt",
        "no/such.py:score",
        "no_such_package.rewards:score",
        f"{SCORES}:NOT_CALLABLE",
    ],
)
def test_a_function_that_cannot_be_imported_is_rejected_with_its_key(path):
    with pytest.raises(ConfigError) as caught:
        FunctionRewards(RewardsConfig({"mine": RewardFunctionConfig(path)}), Letters())
    assert caught.value.key == "rewards.functions.mine.function"
    with pytest.raises(ConfigError) as caught:
        FunctionRewards(RewardsConfig(), Letters())
    assert caught.value.key == "rewards.functions"


@pytest.mark.parametrize("shape", [(3,), (2, 1), ()])
def test_scores_that_are_not_one_for_each_response_are_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError) as caught:
        outcome_scores(torch.ones(shape), torch.ones(2, 4))
    assert caught.value.column == "scores"
