"""Every recipe is checked as its user checks it, with the published sizes of its model and without its weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from examples.recipes.calculator_agent import run
from examples.recipes.dry_runs import PUBLISHED, RECIPES, model_directory, read
from examples.recipes.dry_runs import main as dry_runs
from mcontroller.cli.main import main
from trainer.run.model_roles import role_calls
from workers.planning import planning

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("math_verify")

NAMES = sorted(file.stem for file in RECIPES.glob("*.yaml"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with 1,024 sums."""
    file = tmp_path_factory.mktemp("rows") / "train.jsonl"
    questions = ([{"role": "user", "content": f"what is {number} plus 1"}] for number in range(1024))
    lines = (json.dumps({"prompt": question, "answer": str(number + 1)}) for number, question in enumerate(questions))
    file.write_text("\n".join(lines))
    return file


def with_tokenizer(path: Path) -> Path:
    """Write a tokenizer of letters with a chat template, and return the directory."""
    tokens = ["<s>", "</s>", "?", *"abcdefghijklmnopqrstuvwxyz0123456789 "]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(path / "tokenizer.json"))
    template = "{% for message in messages %}<s>{{ message.content }}</s>{% endfor %}{{ tools | tojson if tools }}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.processes  # check asks the interpreter of the engine whether it has vLLM
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_right_and_fits(name, rows, tmp_path, capsys):
    model = with_tokenizer(model_directory(tmp_path / "model", name.rpartition("-")[0]))
    values = [f"actor_rollout_ref.model.hf_path={model}", f"data.train.path={rows}"]
    assert main(["check", str(RECIPES / f"{name}.yaml"), *values]) == 0, capsys.readouterr()
    printed = capsys.readouterr().out
    peak = re.search(r"trainer.offload=auto: ([\d.]+) of", printed)
    assert peak is not None and float(peak[1]) < 80, printed
    (documented,) = re.findall(rf"`{re.escape(name)}`.*\| ([\d.]+) \|", (RECIPES / "README.md").read_text())
    assert float(documented) == pytest.approx(float(peak[1]), rel=0.02)
    beside = (RECIPES / f"{name}.txt").read_text().splitlines()
    assert [line for line in beside if line not in printed.splitlines()] == []


@pytest.mark.processes  # so do the engines of a configuration
def test_a_layout_that_others_publish_is_one_that_this_project_has(tmp_path):
    with planning():
        layouts = {name: role_calls(read(name, tmp_path)) for name in PUBLISHED}
    assert all("actor_rollout_ref.update_actor" in calls for calls in layouts.values())


@pytest.mark.processes
@pytest.mark.parametrize("name", ["smollm2-135m-grpo", "qwen2.5-3b-tools"])
def test_the_dry_run_of_a_recipe_is_a_row(name, capsys):
    dry_runs([name])
    [*_, row] = capsys.readouterr().out.splitlines()
    (update, most) = re.fullmatch(rf"\| {name} .*\| ([\d.]+)(?:/[\d.]+)* \| ([\d.]+) of 79.1 \| .*", row).groups()
    assert 0 < float(update) < float(most) < 79.1


def test_the_calculator_tells_the_agent_what_is_wrong():
    assert run('{"expression": "3 * (2 + 2)"}') == "12"
    for arguments in ("{", "[]", "{}", '{"expression": "import os"}'):
        assert run(arguments).startswith("error: ")
