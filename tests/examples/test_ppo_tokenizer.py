from __future__ import annotations

import pytest

from examples.ppo.tokenizer import CharTokenizer
from mcontroller.errors import DataError
from trainer.rewards.functions import import_reasoning_gym

QUESTIONS = ["Add these: 12 + 3 =", "Add these: 7 - 45 =", "Add these: 80 + 96 ="]
ANSWERS = ["15", "-38", "176"]


@pytest.mark.parametrize("task", ["chain_sum", "spell_backward", "basic_arithmetic", "gcd"])
def test_texts_of_a_task_come_back_from_their_ids_unchanged(task):
    entries = list(import_reasoning_gym().create_dataset(task, size=50, seed=1))
    questions, answers = ([entry[part] for entry in entries] for part in ("question", "answer"))
    tokenizer = CharTokenizer.of(questions, answers)
    assert [tokenizer.decode(tokenizer.encode(text)) for text in questions + answers] == questions + answers


def test_the_words_that_every_question_begins_with_are_one_token():
    tokenizer = CharTokenizer.of(QUESTIONS, ANSWERS)
    assert tokenizer.instruction == "Add these: "
    assert len(tokenizer.encode(QUESTIONS[0])) == 1 + len(["1", "2", " + ", "3", " ="])
    assert max(tokenizer.encode(QUESTIONS[1])) < tokenizer.vocab_size


def test_decoding_ends_at_the_end_token_and_shows_ids_that_are_no_text():
    tokenizer = CharTokenizer.of(QUESTIONS, ANSWERS)
    ids = [*tokenizer.encode("15"), tokenizer.eos_token_id, *tokenizer.encode("3")]
    assert tokenizer.decode(ids) == "15"
    assert tokenizer.decode([tokenizer.pad_token_id, *tokenizer.encode("1"), 999]) == "\ufffd1\ufffd"


def test_a_text_with_something_unknown_is_rejected_with_its_name():
    with pytest.raises(DataError) as caught:
        CharTokenizer.of(QUESTIONS, ANSWERS).encode("12 * 3")
    assert caught.value.unknown == [" * "]


def test_a_saved_vocabulary_has_the_same_ids(tmp_path):
    tokenizer = CharTokenizer.of(QUESTIONS, ANSWERS)
    tokenizer.save(tmp_path)
    loaded = CharTokenizer.load(tmp_path)
    assert [loaded.encode(text) for text in QUESTIONS] == [tokenizer.encode(text) for text in QUESTIONS]
