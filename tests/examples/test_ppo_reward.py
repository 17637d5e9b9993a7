from __future__ import annotations

import numpy as np
import pytest
import torch

from examples.ppo.config import ProblemConfig
from examples.ppo.data import make_problems
from examples.ppo.reward import ReasoningGymReward
from examples.ppo.tokenizer import CharTokenizer
from mcontroller.data.protocol import DataProto


@pytest.fixture(scope="module")
def problems():
    options = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
    return make_problems(ProblemConfig(options=options, train_size=600, held_out_size=10))


@pytest.fixture(scope="module")
def reward_fn(problems):
    questions, answers = ([entry[part] for entry in problems.train] for part in ("question", "answer"))
    return ReasoningGymReward(problems.scorer, CharTokenizer.of(questions, answers))


def responded(reward_fn, entries, texts) -> DataProto:
    """A batch as the actor returns it for these generated texts; the prompts are unrelated."""
    eos, pad = reward_fn.tokenizer.eos_token_id, reward_fn.tokenizer.pad_token_id
    ids = [[*reward_fn.tokenizer.encode(text), eos] for text in texts]
    width = max(map(len, ids))
    columns = {
        "prompts": torch.ones(len(texts), 5, dtype=torch.long),
        "responses": torch.tensor([row + [pad] * (width - len(row)) for row in ids]),
        "response_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids]),
    }
    return DataProto.from_dict(columns, {"entry": np.array(entries, dtype=object)})


def test_a_right_answer_scores_1_on_its_last_token(problems, reward_fn):
    batch = responded(reward_fn, problems.train, [entry["answer"] for entry in problems.train])
    reward = reward_fn(batch)
    assert reward.columns["accuracy"] == [1.0] * 600
    last = batch.batch["response_mask"].sum(1) - 1
    assert torch.equal(reward.token_level_scores.argmax(1), last)
    assert torch.equal(reward.token_level_scores.sum(1), torch.ones(600))


def test_a_scrambled_answer_scores_0(problems, reward_fn):
    entries = [entry for entry in problems.train if entry["answer"] != entry["answer"][::-1]]
    reward = reward_fn(responded(reward_fn, entries, [entry["answer"][::-1] for entry in entries]))
    assert len(entries) > 200
    assert reward.token_level_scores.abs().sum() == 0 and sum(reward.columns["accuracy"]) == 0


def test_a_text_that_only_contains_the_answer_scores_what_reasoning_gym_says(problems, reward_fn):
    entry = next(entry for entry in problems.train if len(entry["answer"]) == 2)
    reward = reward_fn(responded(reward_fn, [entry], [entry["answer"] + " + "]))
    assert reward.token_level_scores.sum().item() == pytest.approx(2 / 5)
    assert reward.columns["accuracy"] == [0.0]


def test_what_comes_after_the_end_token_does_not_count(problems, reward_fn):
    entry = next(entry for entry in problems.train if entry["answer"] not in ("0", "-0"))
    tokenizer = reward_fn.tokenizer
    ids = [*tokenizer.encode("0"), tokenizer.eos_token_id, *tokenizer.encode(entry["answer"])]
    columns = {"responses": torch.tensor([ids]), "response_mask": torch.ones(1, len(ids), dtype=torch.long)}
    batch = DataProto.from_dict(columns, {"entry": np.array([entry], dtype=object)})
    assert reward_fn.texts(batch) == ["0"]
    assert reward_fn(batch).token_level_scores.sum() == 0
