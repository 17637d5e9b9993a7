"""Bad data and bad reward functions, as a user meets them: one error with the file and line or the problem."""

from __future__ import annotations

import json
import math
import os
from contextlib import closing
from pathlib import Path

import pytest
import ray

from mcontroller.cli.main import main
from mcontroller.files import acquire_lock
from trainer.run.config import read_run_config
from trainer.run.parts import make_parts

RUN = """
imports: [examples.ppo.tokenizer]
tokenizer: {kind: characters}
data: {train: {path: rows.jsonl}, train_batch_size: 2}
rewards: {functions: {mine: {function: "rewards.py:right"}}}
algorithm: {adv_estimator: grpo}
actor_rollout_ref:
  model: {vocab_size: 32, max_sequence_length: 16, num_layers: 2, hidden_size: 64, num_attention_heads: 4}
  rollout: {prompt_length: 8, response_length: 4, n: 2}
"""
REWARDS = """
import os, time
def right(response, answer):
    return float(response == answer)
def text(response):
    return "good"
def several(response):
    return [1.0]
def without_return(response):
    float(response == "1")
def for_other_problems(response, answer):
    return 1.0 if answer == "4" else None
def few(response):
    return [1.0]
def solution(response, solution):
    return 1.0
def ends(response):
    raise SystemExit(3)
def ends_its_process(response):
    os._exit(3)
def never_returns(response):
    time.sleep(1e6)
def reads_answer(response, answer):
    return float(response.endswith(answer))
def does_without(response, answer=None):
    return float(response == answer)
def does_not_apply(response, answer):
    return None if answer is None else float(response == answer)
def reads_level(response, answer, level):
    return float(response == answer)
def boxed(response, answer):
    return float(response == f"[{answer}]")
def always(response, answer):
    return 1.0
async def later(response, answer):
    return float(response != answer)
def all_equal(response, answer):
    return [1.0 for _ in response]
"""
GOOD = ['{"prompt": "Add: 1 + 2 =", "answer": "3"}', '{"prompt": "Add: 2 + 2 =", "answer": "4"}']
CHAT = [{"role": "user", "content": "1 + 1 ="}]
FUNCTION = "rewards.functions.mine.function=rewards.py:{}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "rows.jsonl").write_text("\n".join(GOOD) + "\n")
    return tmp_path


def error_of(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    assert main(["check", "run.yaml", *overrides]) == 1
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1 and "Traceback" not in error
    return error


def trial(*overrides: str) -> list[str]:
    """What ``check`` and ``train`` print of the trial of the reward functions."""
    config = read_run_config("run.yaml", overrides)
    with closing(make_parts(config)) as parts:
        return parts.try_rewards(config)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*GOOD, '{"question": "1"}'], "rows.jsonl, line 3 has no column 'prompt'; it has question"),
        ([], "rows.jsonl is empty: it has no rows"),
        ([GOOD[0], '{"prompt": "1", "ans'], "rows.jsonl, line 2 is not JSON"),
        ([GOOD[0], '"Add: 1 + 1 ="'], "rows.jsonl, line 2 is 'Add: 1 + 1 =' of type str; expected named columns"),
        ([GOOD[0], '{"prompt": null}'], "rows.jsonl, line 2: the prompt is None of type NoneType; expected a text"),
        ([GOOD[0], '{"prompt": ""}'], "rows.jsonl, line 2: the prompt is empty"),
        (
            [json.dumps({"prompt": CHAT, "answer": "2"})],
            "CharTokenizer is made from the texts of the prompts, and no prompt is a text",
        ),
    ],
)
def test_bad_rows_are_reported_with_their_line(folder, capsys, lines, message):
    (folder / "rows.jsonl").write_text("".join(line + "\n" for line in lines))
    assert message in error_of(capsys)


@pytest.mark.simulated
def test_a_file_with_the_mark_of_utf8_at_its_start_is_read(folder, capsys):
    (folder / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(GOOD).encode())
    assert main(["check", "run.yaml"]) == 0
    assert "data.train: 2 prompts" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == [
        "rewards.py",
        "rows.jsonl",
        "run.yaml",
    ]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("text", "it returned 'good' of type str; expected a number or None. prompt 'Add: 1 + 2 =', response '3'"),
        ("several", "it returned [1.0] of type list; expected a number or None. prompt 'Add: 1 + 2 ='"),
        ("without_return", "no reward function applies to the first 2 problems: mine returned None for each"),
        ("solution", "needs 'solution', which is neither a column of the problems nor one of its options"),
        ("ends", "SystemExit: 3"),
        ("ends_its_process", "its process ended with exit code 3"),
        ("never_returns", "it did not return within 2 s"),
    ],
)
def test_a_bad_reward_function_is_reported_with_a_problem_at_the_start(folder, capsys, function, message):
    assert message in error_of(capsys, FUNCTION.format(function), "rewards.timeout_s=2")


@pytest.mark.parametrize("key", ["run_dir", "trainer.default_local_dir"])
def test_a_directory_that_cannot_be_created_is_reported_with_what_prevents_it(folder, capsys, key):
    prevents = folder / "rows.jsonl"
    error = error_of(capsys, f"{key}={prevents}/run")
    assert f"ConfigError: {key} is {prevents}/run, and {prevents} is not a directory" in error


@pytest.mark.processes
@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("algorithm.filter_groups.metric", ["algorithm.filter_groups={enable: true, metric: accuracy}"]),
        (
            "trainer.best_metric",
            [
                "trainer={keep_best: 1, save_freq: 1, test_freq: 1, best_metric: held_out/min}",
                "data.val.path=rows.jsonl",
            ],
        ),
    ],
)
def test_a_metric_that_the_reward_does_not_have_is_reported_before_the_start(folder, capsys, key, overrides):
    assert f"ConfigError: {key} is " in error_of(capsys, *overrides)


@pytest.mark.parametrize("key", ["seed", "data.train.split", "cluster.num_cpus"])
def test_a_value_that_nothing_reads_is_an_error(folder, capsys, key):
    assert f"ConfigError: {key} is " in error_of(capsys, f"{key}=3", "cluster.address=auto")


@pytest.mark.processes
def test_a_function_that_applies_to_a_later_problem_is_accepted(folder):
    trial(FUNCTION.format("for_other_problems"))


PROBLEM = {"prompt": "Add: 2 + 2 =", "answer": "4"}
EXACT = "rewards.functions.mine.function=trainer.rewards.functions:exact_match"
NESTED = [{"prompt": PROBLEM["prompt"], "reward_model": {"ground_truth": "4"}}] * 2


@pytest.mark.processes
@pytest.mark.parametrize("function", [EXACT, FUNCTION.format("right")])
@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        (NESTED, "problem 1 of 2 in data.train, with the columns prompt, reward_model.ground_truth"),
        (
            [PROBLEM, PROBLEM, NESTED[0]],
            "problem 3 of 3 in data.train, with the columns prompt, reward_model.ground_truth",
        ),
        (
            [PROBLEM] * 9 + [PROBLEM | {"answer": None}],
            "problem 10 of 10 in data.train, with the columns prompt",
        ),
        ([PROBLEM, PROBLEM | {"answer": math.nan}], "problem 2 of 2 in data.train, with the columns prompt, answer"),
    ],
)
def test_a_problem_anywhere_without_the_answer_that_is_read_is_an_error(folder, capsys, function, rows, shown):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    error = error_of(capsys, function)
    assert shown in error and "'mine'" in error


@pytest.mark.processes
def test_an_answer_in_a_nested_column_is_read_by_its_key(folder, capsys):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in NESTED))
    assert trial(EXACT, "data.answer_key=reward_model.ground_truth") == []
    error = error_of(capsys, EXACT, "data.answer_key=reward_model.truth")
    assert "has no such column; did you mean reward_model" in error or "has no such column; it has" in error


@pytest.mark.processes
@pytest.mark.parametrize("answer", ["", ["4"], {"value": "4"}])
def test_an_answer_that_is_no_text_or_number_is_an_error(folder, capsys, answer):
    rows = [PROBLEM, PROBLEM, PROBLEM | {"answer": answer}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    error = error_of(capsys, EXACT)
    assert "problem 3 of 3 in data.train" in error and repr(answer) in error


@pytest.mark.processes
def test_a_held_out_problem_without_its_answer_is_an_error(folder, capsys):
    (folder / "val.jsonl").write_text(f'{GOOD[0]}\n{{"prompt": "1 + 2 ="}}\n')
    error = error_of(capsys, EXACT, "data.val.path=val.jsonl")
    assert "problem 2 of 2 in data.val, with the columns prompt" in error


@pytest.mark.processes
def test_a_column_that_a_later_problem_lacks_is_an_error(folder, capsys):
    rows = [PROBLEM | {"level": 1}, PROBLEM]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    error = error_of(capsys, FUNCTION.format("reads_level"))
    assert "needs 'level'" in error and "(problem 2 of 2 in data.train): there are prompt, answer, response" in error


@pytest.mark.processes
@pytest.mark.parametrize("function", ["does_without", "does_not_apply"])
def test_a_function_may_do_without_an_answer_or_not_apply(folder, function):
    (folder / "rows.jsonl").write_text("\n".join([*GOOD, '{"prompt": "1 + 2 ="}']))
    trial(FUNCTION.format(function))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("function", "facts"),
    [
        ("boxed", ("2 of 2 right answers in data.train", "such as '3' with 0, and '' with 0")),
        ("always", ("2 of 2 right answers in data.train", "such as '3' with 1, and '' with 1")),
        ("later", ("2 of 2 right answers in data.train", "such as '3' with 0, and '' with 1")),
        ("all_equal", ("2 of 2 right answers in data.train", "such as '3' with 1, and '' with 1")),
        ("for_other_problems", ("1 of 2 right answers in data.train", "such as '4' with 1, and '' with 1")),
        ("right", ()),
    ],
)
def test_there_is_one_line_if_right_answers_do_not_get_the_best_score(folder, function, facts):
    lines = trial(FUNCTION.format(function), "rewards.functions.mine.batch=" + str(function == "all_equal").lower())
    assert len(lines) == bool(facts) and all(fact in text for text in lines for fact in facts)


@pytest.mark.processes
def test_the_weighted_sum_of_functions_is_what_right_answers_are_compared_by(folder):
    [line] = trial("rewards.functions.other={function: 'rewards.py:right', weight: -2.0}")
    assert "2 of 2 right answers in data.train" in line and "such as '3' with -1" in line


@pytest.mark.processes
@pytest.mark.parametrize("answers", [[3, 4], [3.0, 4.0], [True, False]])
def test_answers_that_are_numbers_or_booleans_get_the_best_score(folder, answers):
    rows = [PROBLEM | {"answer": answer} for answer in answers]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert trial(EXACT) == []


@pytest.mark.processes
def test_train_reports_the_same_before_it_starts_ray(folder, capsys):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [PROBLEM, PROBLEM, NESTED[0]]))
    assert main(["train", "run.yaml", EXACT]) == 1
    assert "problem 3 of 3 in data.train, with the columns prompt, reward_model.ground_truth" in capsys.readouterr().err
    assert not ray.is_initialized()


def test_an_answer_that_is_too_long_with_its_end_is_reported(folder, capsys):
    error = error_of(capsys, "warm_up.steps=1", "warm_up.batch_size=1", "actor_rollout_ref.rollout.response_length=1")
    assert "has 2 tokens; rollout.response_length is 1, too short for 2 of 2 answers: set rollout.response_le" in error


@pytest.mark.processes
@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1", "no address"])
def test_an_address_without_a_cluster_is_reported_at_once(folder, capfd, address):
    assert main(["check", "run.yaml", f"cluster.address={address}"]) == 1
    error = capfd.readouterr().err
    assert f"no Ray cluster answers at cluster.address={address}: " in error and len(error.splitlines()) == 1


@pytest.mark.processes
def test_a_second_run_in_the_directory_of_a_living_one_writes_nothing(folder, capsys):
    (ready, started), (ended, end) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        acquire_lock(folder / "out" / "run.lock", "the first run")
        os.close(started)
        os.close(end)
        os.read(ended, 1)
        os._exit(0)
    os.close(started)
    os.read(ready, 1)
    assert main(["train", "run.yaml", "run_dir=out", "trainer.total_training_steps=1"]) == 1
    assert f"the run in {folder}/out is in use by process {pid} on " in capsys.readouterr().err
    assert [entry.name for entry in (folder / "out").iterdir()] == ["run.lock"]
    os.close(end)
    os.waitpid(pid, 0)
