from __future__ import annotations

import pytest

from examples.ppo.config import ProblemConfig, read_config
from examples.ppo.data import Demonstrations, Prompts, make_problems
from examples.ppo.tokenizer import CharTokenizer
from mcontroller.errors import ConfigError, DataError

THREE_TERMS = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}


def tokenizer_of(problems):
    entries = [*problems.train, *problems.held_out]
    return CharTokenizer.of([entry["question"] for entry in entries], [entry["answer"] for entry in entries])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_held_out_problems_share_no_prompt_with_the_training_problems(seed):
    config = read_config([f"seed={seed}"]).problems
    problems = make_problems(config)
    held_out = {entry["question"] for entry in problems.held_out}
    train = {entry["question"] for entry in problems.train}
    assert len(held_out) == config.held_out_size == 256 and len(train) == config.train_size
    assert held_out.isdisjoint(train)
    tokenizer = tokenizer_of(problems)
    as_ids = [{tuple(tokenizer.encode(question)) for question in questions} for questions in (held_out, train)]
    assert len(as_ids[0]) == 256 and as_ids[0].isdisjoint(as_ids[1])


def test_seeds_give_different_problems_and_a_seed_the_same_ones():
    config = ProblemConfig(options=THREE_TERMS, train_size=50, held_out_size=20, seed=3)
    questions = [[entry["question"] for entry in make_problems(config).train] for _ in range(2)]
    other = make_problems(ProblemConfig(options=THREE_TERMS, train_size=50, held_out_size=20, seed=4))
    assert questions[0] == questions[1] != [entry["question"] for entry in other.train]


def test_a_task_with_too_few_questions_is_rejected_with_the_numbers():
    few = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(ConfigError, match=r"chain_sum has 200 different questions in .* 100 \+ train_size 150 = 250"):
        make_problems(ProblemConfig(options=few, train_size=150, held_out_size=100))


def test_an_unknown_task_or_option_is_rejected_with_its_name():
    with pytest.raises(ConfigError, match="no task 'chain_sums'"):
        make_problems(ProblemConfig(task="chain_sums"))
    with pytest.raises(ConfigError, match="chain_sum has no option 'terms'; it has min_terms, max_terms"):
        make_problems(ProblemConfig(options={"terms": 3}))


def test_prompts_are_padded_on_the_left_and_demonstrations_teach_the_answer_alone():
    problems = make_problems(ProblemConfig(options=THREE_TERMS, train_size=60, held_out_size=4))
    tokenizer = tokenizer_of(problems)
    prompt, shown = (
        rows[7] for rows in (Prompts(problems.train, tokenizer, 9), Demonstrations(problems.train, tokenizer, 9, 4))
    )
    assert prompt["attention_mask"].tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert tokenizer.decode(prompt["input_ids"][2:].tolist()) == prompt["entry"]["question"]
    taught = shown["input_ids"][shown["loss_mask"].bool()].tolist()
    assert tokenizer.decode(taught) == prompt["entry"]["answer"] and taught[-1] == tokenizer.eos_token_id
    assert shown["input_ids"][:9].tolist() == prompt["input_ids"].tolist()
    assert shown["attention_mask"].tolist() == prompt["attention_mask"].tolist() + shown["loss_mask"][9:].tolist()


def test_a_question_longer_than_the_prompt_is_rejected_with_both_lengths():
    problems = make_problems(ProblemConfig(options=THREE_TERMS, train_size=60, held_out_size=4))
    with pytest.raises(DataError, match=r"is 7 tokens; rollout.prompt_length is 6"):
        Prompts(problems.train, tokenizer_of(problems), 6)[0]
