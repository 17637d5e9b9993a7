from __future__ import annotations

import importlib.util
import json
import os

import pytest

from mcontroller.errors import ConfigError, DataError
from trainer.data.config import DatasetConfig
from trainer.data.sources import DATASET_SOURCES, Records, load_records

ROWS = [{"prompt": f"{number} + 1 =", "answer": str(number + 1)} for number in range(5)]
THREE_TERMS = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
needs_datasets = pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="the extra data: no datasets")
needs_pyarrow = pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="the extra data: no pyarrow")


def jsonl(tmp_path, *lines):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_lines_of_json_are_records_with_their_line_numbers(tmp_path):
    path = jsonl(tmp_path, json.dumps(ROWS[0]), "", json.dumps({"prompt": "line\u2028separator"}, ensure_ascii=False))
    records = load_records(DatasetConfig(str(path)), "data.train")
    assert [row["prompt"] for row in records.rows] == ["0 + 1 =", "line\u2028separator"]
    assert records.locations[1] == f"{path}, line 3"


def test_skip_and_size_select_rows(tmp_path):
    path = str(jsonl(tmp_path, *map(json.dumps, ROWS)))
    assert load_records(DatasetConfig(path, skip=1, size=2), "data.train").rows == ROWS[1:3]
    assert load_records(DatasetConfig(path, skip=3), "data.train").rows == ROWS[3:]
    with pytest.raises(DataError) as caught:
        load_records(DatasetConfig(path, skip=4, size=2), "data.train")
    assert caught.value.rows == 5


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        ([], 0),
        (['{"prompt": "a"}', '{"prompt": '], 2),
        (['"a plain string"'], 1),
        (['{"prompt": ' + "[" * 200_000], 1),
        ([f'{{"prompt": {"1" * 5000}}}'], 1),
    ],
)
def test_a_broken_file_is_rejected_with_the_file_and_the_line(tmp_path, lines, line):
    path = str(jsonl(tmp_path, *lines))
    with pytest.raises(DataError) as caught:
        load_records(DatasetConfig(path), "data.train")
    fields = caught.value.fields
    location = fields.get("location", f"{fields.get('path')}, line {fields.get('line', 0)}")
    assert location == f"{path}, line {line}"


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (DatasetConfig(), "data.train.path"),
        (DatasetConfig("no/such.jsonl"), "path"),
        (DatasetConfig("pyproject.toml"), "source"),
        (DatasetConfig("a.jsonl", source="jsnl"), "data.train.source"),
        (DatasetConfig(source="reasoning_gym", task="chain_sums", size=3), "task"),
        (
            DatasetConfig(source="reasoning_gym", task="chain_sum", size=3, options={"min_term": 1}),
            "options.min_term",
        ),
    ],
)
def test_a_wrong_source_is_rejected_with_the_nearest_name(config, key):
    with pytest.raises(ConfigError) as caught:
        load_records(config, "data.train")
    assert caught.value.key == key


def test_a_whole_surrogate_pair_is_one_character(tmp_path):
    path = jsonl(tmp_path, '{"prompt": "\\ud83d\\ude00"}')
    assert load_records(DatasetConfig(str(path)), "data.train").rows == [{"prompt": "\U0001f600"}]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_pointer_of_git_lfs_is_rejected_with_what_to_do(tmp_path, name):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n")
    with pytest.raises(ConfigError) as caught:
        load_records(DatasetConfig(str(tmp_path / name)), "data.train")
    assert caught.value.value == str(tmp_path / name) and "git lfs pull" in str(caught.value)


def test_a_path_that_has_no_end_is_rejected_before_it_is_read(tmp_path):
    (tmp_path / "rows.jsonl").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name in ("rows.jsonl", "pipe.jsonl"):
        with pytest.raises(ConfigError) as caught:
            load_records(DatasetConfig(str(tmp_path / name)), "data.train")
        assert caught.value.key == "path"


@needs_pyarrow
def test_keys_that_parquet_adds_to_a_row_are_left_out(tmp_path):
    import pyarrow
    from pyarrow import parquet

    parts = [{"type": "text", "text": "hi"}, {"type": "image", "url": "a.png"}]
    rows = [
        {"messages": [{"role": "user", "content": parts}], "info": {"a": 1}, "tags": ["x", None]},
        {"messages": [{"role": "assistant", "content": None, "name": "b"}], "info": None, "tags": None},
        {"messages": [{"role": "user", "content": []}], "info": {"b": {"c": 2}}, "tags": []},
    ]
    table = pyarrow.Table.from_pylist(rows)
    pairs = pyarrow.array([[("k", None)], None, []], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    parquet.write_table(table.append_column("pairs", pairs), tmp_path / "rows.parquet")
    read = load_records(DatasetConfig(str(tmp_path / "rows.parquet")), "data.train").rows
    assert read == [{**row, "pairs": given} for row, given in zip(rows, ({"k": None}, None, {}), strict=True)]


@needs_pyarrow
def test_a_parquet_file_has_the_rows_of_its_table(tmp_path):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    records = load_records(DatasetConfig(str(tmp_path / "rows.parquet")), "data.train")
    assert records.rows == ROWS and records.locations[2].endswith("rows.parquet, row 2")


@needs_pyarrow
def test_a_file_that_is_not_parquet_or_is_damaged_is_rejected_with_its_name(tmp_path):
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS * 50), path)
    whole = path.read_bytes()
    for content in (b"text", whole[:100], whole[:8] + b"\xff" * 60 + whole[68:]):
        path.write_bytes(content)
        with pytest.raises(DataError) as caught:
            load_records(DatasetConfig(str(path)), "data.train")
        assert caught.value.path == str(path)


@needs_datasets
def test_a_saved_dataset_is_read_by_split(tmp_path):
    import datasets

    whole = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS[:3]), "test": datasets.Dataset.from_list(ROWS)}
    )
    whole.save_to_disk(tmp_path / "saved")
    assert load_records(DatasetConfig(str(tmp_path / "saved"), split="test"), "data.val").rows == ROWS
    with pytest.raises(DataError):
        load_records(DatasetConfig(str(tmp_path / "saved"), split="tests"), "data.val")


@needs_datasets
def test_a_directory_of_files_is_loaded_by_datasets(tmp_path):
    jsonl(tmp_path, *map(json.dumps, ROWS))
    assert load_records(DatasetConfig(str(tmp_path)), "data.train").rows == ROWS


@needs_datasets
def test_a_directory_with_a_broken_file_is_rejected_with_the_reason(tmp_path):
    jsonl(tmp_path, json.dumps(ROWS[0]), '{"prompt": "1 +')
    with pytest.raises(DataError):
        load_records(DatasetConfig(str(tmp_path)), "data.train")


@pytest.mark.parametrize("seed", [0, 1])
def test_two_selections_of_a_task_share_no_question(seed):
    task = {"source": "reasoning_gym", "task": "chain_sum", "options": THREE_TERMS, "seed": seed}
    held_out = load_records(DatasetConfig(**task, size=256), "data.val")
    train = load_records(DatasetConfig(**task, skip=256, size=2000), "data.train")
    questions = [{row["prompt"] for row in records.rows} for records in (held_out, train)]
    assert [len(part) for part in questions] == [256, 2000] and questions[0].isdisjoint(questions[1])


def test_seeds_give_different_problems_and_a_seed_the_same_ones():
    def prompts(seed):
        config = DatasetConfig(source="reasoning_gym", task="chain_sum", size=50, seed=seed)
        return [row["prompt"] for row in load_records(config, "data.train").rows]

    assert prompts(3) == prompts(3) != prompts(4)


def test_a_task_with_too_few_questions_is_rejected_with_the_numbers():
    few = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    config = DatasetConfig(source="reasoning_gym", task="chain_sum", options=few, skip=100, size=150)
    with pytest.raises(ConfigError) as caught:
        load_records(config, "data.train")
    assert (caught.value.key, caught.value.value) == ("size", 150)


def test_the_objects_of_an_array_are_records(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS, indent=1))
    records = load_records(DatasetConfig(str(path)), "data.train")
    assert (records.rows, records.locations[4]) == (ROWS, f"{path}, row 4")


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ('[{"prompt": "a"},\n {"prompt" 1}]', {"line": 2}),
        ('[{"prompt": "a"}, 3]', {"location": "row 1"}),
        ("[]", {}),
    ],
)
def test_a_broken_array_is_rejected_with_its_line_or_row(tmp_path, text, fields):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        load_records(DatasetConfig(str(path)), "data.train")
    expected = {"location": f"{path}, {fields['location']}"} if "location" in fields else fields | {"path": str(path)}
    assert caught.value.fields == expected


@pytest.mark.parametrize(
    ("records", "fields"),
    [
        (Records("mine", ROWS, ["row 0"]), {"rows": 5, "locations": 1}),
        (Records("mine", ["prompt"], ["row 0"]), {"location": "row 0"}),
    ],
)
def test_what_a_reader_returns_is_checked(monkeypatch, records, fields):
    monkeypatch.setitem(DATASET_SOURCES._entries, "mine", lambda config: records)
    with pytest.raises(DataError) as caught:
        load_records(DatasetConfig(source="mine"), "data.train")
    assert caught.value.fields == fields
