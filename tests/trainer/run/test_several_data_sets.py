"""Configurations with several files, mixtures and evaluations: what is read, and what is reported."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from mcontroller.errors import ConfigError, MControllerError
from trainer import BatchStream, ValidationConfig
from trainer.run.config import RunConfig, check_files, read_run_config
from trainer.run.parts import make_parts

SETTINGS = """
imports: [examples.ppo.tokenizer]
tokenizer: {kind: characters}
rewards: {functions: {right: {function: "trainer.rewards.functions:exact_match"}}}
algorithm: {adv_estimator: grpo}
actor_rollout_ref:
  model:
    {vocab_size: 32, max_sequence_length: 32, num_layers: 2, hidden_size: 64, num_attention_heads: 2}
  rollout: {n: 2, prompt_length: 8, response_length: 6}
"""


def write(directory: Path, name: str, first: int, count: int) -> str:
    sums = [(first + number, number % 10) for number in range(count)]
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums]
    (directory / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(directory / name)


def configured(directory: Path, data: str, *overrides: str) -> RunConfig:
    (directory / "run.yaml").write_text(f"{SETTINGS}data: {data}\n")
    return read_run_config(directory / "run.yaml", overrides)


def test_several_files_are_read_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, first, count in (("a.jsonl", 10, 6), ("b.jsonl", 30, 4)):
        write(tmp_path, name, first, count)
    config = configured(tmp_path, "{train: {path: [a.jsonl, b.jsonl], skip: 1}, train_batch_size: 4}").within(tmp_path)
    check_files(config)
    parts = make_parts(config)
    prompts = [parts.train[row]["prompt"] for row in range(len(parts.train))]
    assert prompts == ["11+1=", "12+2=", "13+3=", "14+4=", "15+5=", "30+0=", "31+1=", "32+2=", "33+3="]
    assert parts.problem_lines() == ["data.train: 9 prompts"]
    assert config.data.train.path == [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    (tmp_path / "b.jsonl").write_text('{"prompt": "1"}\n{"prompt": \n')
    with pytest.raises(MControllerError) as caught:
        make_parts(config)
    assert caught.value.line == 2
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(ConfigError) as caught:
        check_files(config)
    assert caught.value.key == "path"


def test_a_mixture_and_evaluations_are_parts_of_a_run(tmp_path: Path) -> None:
    few, many, other = (
        write(tmp_path, name, 20, count) for name, count in (("f.jsonl", 4), ("m.jsonl", 12), ("o.jsonl", 3))
    )
    config = configured(
        tmp_path,
        f"{{mixture: {{few: {{path: {few}, weight: 3}}, many: {{path: {many}, weight: 1}}}}, train_batch_size: 8, "
        f"evaluations: {{other: {{path: {other}, response_length: 4, n: 3, do_sample: true}}}}}}",
        "trainer.epochs=3",
        "warm_up={steps: 1, batch_size: 16}",
    ).within(tmp_path)
    check_files(config)
    parts = make_parts(config)
    batch = BatchStream(parts.train, 8, 0)[0]
    records = [json.loads(line) for line in Path(few).read_text().splitlines()]
    assert sum(record in records for record in batch.non_tensor_batch["record"]) >= 6
    assert parts.val is None and parts.evaluations["other"].sampling == ValidationConfig(3, True, response_length=4)
    assert len(parts.evaluations["other"].problems) == 3 and len(parts.warm_up) == 16 and parts.steps(config) == 6
    assert parts.problem_lines() == [
        "data.mixture.few: 4 prompts",
        "data.mixture.many: 12 prompts",
        "data.evaluations.other: 3 prompts",
    ]


def test_wrong_sections_are_reported_together_with_their_keys(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", 10, 4)
    config = configured(
        tmp_path,
        f"{{mixture: {{a: {{path: {path}}}}}, train_batch_size: 2, evaluations: "
        f"{{long: {{path: {path}, response_length: 7}}, equal: {{path: {path}, n: 2}}}}}}",
    ).within(tmp_path)
    with pytest.raises(ConfigError) as raised:
        make_parts(config)
    assert {error.key for error in raised.value.errors} == {
        "data.evaluations.long.response_length",
        "data.evaluations.equal.n",
    }
    missing = dataclasses.replace(config, data=dataclasses.replace(config.data, mixture={}))
    with pytest.raises(ConfigError) as caught:
        check_files(missing)
    assert caught.value.key == "data.train.path"
