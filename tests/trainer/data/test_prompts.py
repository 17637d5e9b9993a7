from __future__ import annotations

import pytest

from mcontroller.errors import ConfigError, DataError
from trainer.data.config import ProblemsConfig
from trainer.data.prompts import Demonstrations, PromptRows
from trainer.data.sources import Records
from trainer.data.tokenizers import TokenizerSource


class Letters:
    """One token per character; chat messages become ``<role>content``."""

    eos_token_id, pad_token_id, vocab_size = 1, 0, 256

    def encode(self, text):
        return [ord(letter) for letter in text]

    def decode(self, ids):
        return "".join(map(chr, ids))

    def render(self, messages, **arguments):
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)


def records(*rows):
    return Records("rows.jsonl", rows, [f"rows.jsonl, line {number + 1}" for number in range(len(rows))])


def test_prompts_are_padded_on_the_left_and_keep_their_record():
    row = {"question": "1+1", "answer": "2", "level": 3}
    prompt = PromptRows(records(row), ProblemsConfig(prompt_key="question"), Letters(), 5)[0]
    assert prompt["input_ids"].tolist() == [0, 0, 49, 43, 49]
    assert prompt["attention_mask"].tolist() == [0, 0, 1, 1, 1]
    assert (prompt["prompt"], prompt["answer"], prompt["record"]) == ("1+1", "2", row)


def test_prompts_that_are_too_long_are_dropped_and_counted():
    prompts = PromptRows(
        records({"prompt": "abc"}, {"prompt": "abcd"}, {"prompt": "ab"}), ProblemsConfig(), Letters(), 3
    )
    assert [prompts[index]["prompt"] for index in range(len(prompts))] == ["abc", "ab"] and prompts.dropped == 1
    with pytest.raises(DataError) as caught:
        PromptRows(records({"prompt": "abcd"}), ProblemsConfig(), Letters(), 2)
    assert caught.value.prompt_length == 2


def test_prompts_that_are_too_long_are_rejected_or_lose_their_beginning():
    rows = records({"prompt": "abc"}, {"prompt": "abcde"})
    prompts = PromptRows(rows, ProblemsConfig(truncation="left"), Letters(), 3)
    assert [prompts[index]["input_ids"].tolist() for index in range(2)] == [[97, 98, 99], [99, 100, 101]]
    assert (prompts.truncated, prompts.dropped, prompts[1]["prompt"]) == (1, 0, "abcde")
    with pytest.raises(DataError) as caught:
        PromptRows(rows, ProblemsConfig(truncation="error"), Letters(), 3)
    assert (caught.value.location, caught.value.prompt_length) == ("rows.jsonl, line 2", 3)
    with pytest.raises(ConfigError) as caught:
        ProblemsConfig(truncation="right")
    assert (caught.value.key, caught.value.value) == ("data.truncation", "right")


def test_a_prompt_with_half_of_a_surrogate_pair_is_rejected_with_its_line():
    with pytest.raises(DataError) as caught:
        PromptRows(records({"prompt": "a\ud800"}), ProblemsConfig(), Letters(), 9)
    assert caught.value.location == "rows.jsonl, line 1"


def test_chat_messages_and_system_prompt_go_through_the_chat_template():
    chat = [{"role": "user", "content": "hi"}]
    config = ProblemsConfig(system_prompt="be brief")
    assert PromptRows(records({"prompt": chat}), config, Letters(), 99)[0]["prompt"] == "<system>be brief<user>hi"
    wrapped = PromptRows(records({"prompt": "hi"}), ProblemsConfig(chat_template=True), Letters(), 99)
    assert wrapped[0]["prompt"] == "<user>hi"
    assert PromptRows(records({"prompt": "hi"}), ProblemsConfig(), Letters(), 99)[0]["prompt"] == "hi"


def test_the_prefix_of_the_tokenizer_begins_texts_alone():
    class Prefixing(Letters):
        text_prefix = [7, 8]  # noqa: RUF012

    def ids(prompt, **config):
        return PromptRows(records({"prompt": prompt}), ProblemsConfig(**config), Prefixing(), 12)[0][
            "input_ids"
        ].tolist()

    assert ids("ab") == [0] * 8 + [7, 8, 97, 98]
    assert ids("\x07\x08ab") == [0] * 8 + [7, 8, 97, 98], "the text has it already"
    assert ids("ab", chat_template=True) == [0] * 4 + [ord(letter) for letter in "<user>ab"]
    assert ids([{"role": "user", "content": "ab"}]) == ids("ab", chat_template=True)
    with pytest.raises(DataError) as caught:
        ids("abcdefghijk")
    assert caught.value.prompt_length == 12


@pytest.mark.parametrize("row", [{"question": "a"}, {"prompt": 7}, {"prompt": ["hi"]}, {"prompt": ""}])
def test_a_record_without_a_usable_prompt_is_rejected_with_its_line(row):
    with pytest.raises(DataError) as caught:
        PromptRows(records({"prompt": "a"}, row), ProblemsConfig(), Letters(), 9)
    assert caught.value.location == "rows.jsonl, line 2"


def test_an_answer_column_that_no_record_has_is_rejected_with_those_there_are():
    rows = records({"prompt": "a", "answer": "b"}, {"prompt": "c", "level": 2})
    with pytest.raises(ConfigError) as caught:
        PromptRows(rows, ProblemsConfig(answer_key="anser"), Letters(), 5)
    assert (caught.value.key, caught.value.value) == ("data.answer_key", "anser")
    assert PromptRows(records({"prompt": "a"}), ProblemsConfig(), Letters(), 5)[0]["answer"] is None


def test_demonstrations_teach_the_answer_and_the_end_alone():
    prompts = PromptRows(records({"prompt": "1+1", "answer": "2"}), ProblemsConfig(), Letters(), 4)
    shown = Demonstrations(prompts, 3)[0]
    assert shown["input_ids"].tolist() == [0, 49, 43, 49, 50, 1, 0]
    assert shown["attention_mask"].tolist() == [0, 1, 1, 1, 1, 1, 0]
    assert shown["loss_mask"].tolist() == [0, 0, 0, 0, 1, 1, 0]
    with pytest.raises(DataError) as caught:
        Demonstrations(prompts, 1)
    assert (caught.value.length, caught.value.most) == (2, 1)


def test_a_tokenizer_without_a_chat_template_is_rejected_for_chat_messages(tmp_path):
    pytest.importorskip("transformers", reason="the extra hf: no transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from trainer.data import hf_tokenizer  # noqa: F401  # registers it
    from trainer.data.tokenizers import TOKENIZERS, TokenizerSource

    core = Tokenizer(models.WordLevel({"<eos>": 0, "hi": 1, "user": 2, "<unk>": 3}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    saved = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    saved.save_pretrained(tmp_path / "plain")
    saved.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}{% endfor %}"
    saved.save_pretrained(tmp_path / "chat")
    chat = records({"prompt": [{"role": "user", "content": "hi"}]})
    plain, templated = (
        TOKENIZERS["huggingface"](TokenizerSource(str(tmp_path / name), lambda: ([], []))) for name in ("plain", "chat")
    )
    row = PromptRows(chat, ProblemsConfig(), templated, 3)[0]
    assert row["prompt"] == "user hi" and row["input_ids"].tolist() == [0, 2, 1]
    assert templated.pad_token_id == 0 and templated.decode([2, 1, 0]) == "user hi"
    with pytest.raises(ConfigError) as caught:
        PromptRows(chat, ProblemsConfig(), plain, 3)
    assert caught.value.key == "tokenizer.path"
    assert plain.encode("hi") == [1]


def test_generation_config_and_arguments_of_the_template_are_used(tmp_path):
    pytest.importorskip("transformers", reason="the extra hf: no transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from trainer.data.hf_tokenizer import HuggingFaceTokenizer
    from trainer.data.tokenizers import TokenizerConfig, TokenizerSource

    core = Tokenizer(models.WordLevel({"<eos>": 0, "hi": 1, "<turn>": 2, "<unk>": 3}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    saved = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<turn>")
    saved.chat_template = "{{ messages[0].content }} {{ enable_thinking }} {% for t in tools %}{{ t.name }}{% endfor %}"
    saved.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    config = TokenizerConfig(chat_template_kwargs={"enable_thinking": False, "tools": [{"name": "search"}]})
    source = TokenizerSource(str(tmp_path), lambda: ([], []), config.chat_template_kwargs)
    tokenizer = HuggingFaceTokenizer(source)
    assert tokenizer.render([{"role": "user", "content": "hi"}]) == "hi False search"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == ([2, 0], 2)
    with pytest.raises(ConfigError) as caught:
        TokenizerConfig(chat_template_kwargs={"tokenize": True})
    assert (caught.value.key, caught.value.value) == ("tokenizer.chat_template_kwargs", {"tokenize": True})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(ConfigError) as caught:
        HuggingFaceTokenizer(source)
    assert caught.value.key == "eos_token_id"


@pytest.mark.parametrize("template", ["$A", "<bos> $A", "<bos> <hi> $A <eos>", "$A <eos>"])
def test_prompts_that_are_texts_begin_as_the_tokenizer_begins_them(template, tmp_path):
    pytest.importorskip("transformers", reason="the extra hf: no transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    from trainer.data.hf_tokenizer import HuggingFaceTokenizer

    names = ["<eos>", "<bos>", "<hi>", "<unk>", "one", "two"]
    core = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(name, index) for index, name in enumerate(names[:3])]
    )
    saved = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", bos_token="<bos>", unk_token="<unk>")
    saved.save_pretrained(tmp_path)
    tokenizer = HuggingFaceTokenizer(TokenizerSource(str(tmp_path), lambda: ([], [])))
    row = PromptRows(records({"prompt": "one two"}), ProblemsConfig(), tokenizer, 9)[0]
    begun = saved("one two")["input_ids"]
    assert row["input_ids"][row["attention_mask"] == 1].tolist() == begun[: len(begun) - template.endswith("<eos>")]
    assert tokenizer.encode("one") == [4] and tokenizer.encode("") == []


def test_damaged_and_missing_files_of_a_tokenizer_are_rejected_with_their_name(tmp_path):
    """Without its vocabulary, transformers makes a tokenizer that has no tokens."""
    pytest.importorskip("transformers", reason="the extra hf: no transformers")
    from trainer.data.hf_tokenizer import HuggingFaceTokenizer

    def error() -> str:
        with pytest.raises(ConfigError) as raised:
            HuggingFaceTokenizer(TokenizerSource(str(tmp_path), lambda: ([], [])))
        assert "\n" not in str(raised.value) and raised.value.key == "tokenizer.path"
        return str(raised.value)

    settings = tmp_path / "tokenizer_config.json"
    settings.write_text('{"tokenizer_class": "Qwen2Tokenizer", "eos_token": "</s>"}')
    assert "it has none of merges.txt, tokenizer.json, vocab.json" in error()
    for content in ("", "[]", '{"a', "{}"):
        (tmp_path / "tokenizer.json").write_text(content)
        assert f"cannot load the tokenizer in tokenizer.path {str(tmp_path)!r}" in error()
    (tmp_path / "chat_template.jinja").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 1\n")
    assert "chat_template.jinja' is a pointer of Git LFS" in error()
