"""Models with another vocabulary than the policy, whose token ids they read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from mcontroller.cli.main import main
from mcontroller.errors import ConfigError
from trainer.data.tokenizers import TOKENIZERS, TextTokenizer, TokenizerSource
from trainer.run.config import read_run_config
from trainer.run.parts import check_vocabulary

MODEL = {"vocab_size": 8, "max_sequence_length": 16, "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
RUN = {
    "imports": ["examples.ppo.tokenizer"],
    "tokenizer": {"kind": "characters"},
    "data": {"train": {"path": "rows.jsonl"}, "train_batch_size": 1},
    "algorithm": {"adv_estimator": "grpo"},
    "actor_rollout_ref": {"model": MODEL, "rollout": {"prompt_length": 8, "response_length": 4, "n": 2}},
}
TOKENS = ["<eos>", "<unk>", "the", "cat", "sat"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(json.dumps(RUN))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ab", "answer": "b"}\n')
    return tmp_path


def save_tokenizer(path: Path, tokens: list[str], *added: str) -> TextTokenizer:
    """Save a tokenizer of words with these ids, and return it as a run reads it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token="<unk>")
    made.add_tokens([*added])
    made.save_pretrained(path)
    return TOKENIZERS["huggingface"](TokenizerSource(str(path), lambda: ([], [])))


def run_with(role: str, path: Path, size: int = 8) -> Any:
    """A run whose model of a role is in a directory."""
    overrides = [f"{role}={json.dumps({'model': MODEL | {'vocab_size': size}})}"]
    config = read_run_config("run.yaml", overrides)
    section = getattr(config, role)
    model = dataclasses.replace(section.model, hf_path=str(path))
    return dataclasses.replace(config, **{role: dataclasses.replace(section, model=model)})


@pytest.mark.parametrize("role", ["reward_model", "critic", "ref"])
@pytest.mark.parametrize(
    ("tokens", "added", "shown"),
    [
        (["<eos>", "<unk>", "cat", "the", "sat"], (), "2 of 5 token ids differ, such as id 2: 'the' for the policy"),
        (TOKENS[:-1], (), "1 of 5 token ids differ, such as id 4: 'sat' for the policy, None for"),
        ([*TOKENS[:-1], "dog", "sat"], (), "1 of 5 token ids differ, such as id 4: 'sat' for the policy, 'dog' for"),
    ],
)
def test_a_model_with_another_vocabulary_is_rejected(folder, role, tokens, added, shown):
    policy = save_tokenizer(folder / "policy", TOKENS)
    save_tokenizer(folder / "other", tokens, *added)
    with pytest.raises(ConfigError) as raised:
        check_vocabulary(run_with(role, folder / "other"), policy)
    assert raised.value.key == f"{role}.model.hf_path" and shown in str(raised.value)


def test_equal_vocabularies_may_have_other_sizes_and_added_tokens(folder):
    policy = save_tokenizer(folder / "policy", TOKENS, "<think>")
    save_tokenizer(folder / "longer", TOKENS, "<think>", "<tool>")
    save_tokenizer(folder / "shorter", TOKENS)
    for name in ("longer", "shorter", "policy"):
        check_vocabulary(run_with("reward_model", folder / name, size=12), policy)
    save_tokenizer(folder / "other", TOKENS, "<tool>")
    with pytest.raises(ConfigError) as caught:
        check_vocabulary(run_with("reward_model", folder / "other"), policy)
    assert caught.value.key == "reward_model.model.hf_path"


def test_a_tokenizer_that_cannot_decode_all_ids_of_the_model_is_rejected(folder):
    class Words:
        vocab_size = 5

        def decode(self, ids: list[int]) -> str:
            return " ".join(TOKENS[index] for index in ids)

    with pytest.raises(ConfigError) as caught:  # the model has 8 token ids
        check_vocabulary(read_run_config("run.yaml"), Words())  # type: ignore[arg-type]
    assert (caught.value.key, caught.value.value) == ("actor_rollout_ref.model.vocab_size", 8)


@pytest.mark.parametrize(("role", "size"), [("reward_model", 64), ("reward_model", 4), ("ref", 64)])
def test_check_rejects_a_model_of_another_size_without_a_tokenizer(folder, capsys, role, size):
    model = f"{role}={json.dumps({'model': MODEL | {'vocab_size': size}})}"
    function = "rewards.functions.mine.function=trainer.rewards.functions:exact_match"
    for verb in ("check", "train"):
        assert main([verb, "run.yaml", model, function]) == 1
        assert f"{role}.model.vocab_size is {size}" in capsys.readouterr().err
