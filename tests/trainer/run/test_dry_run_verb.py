"""``mcontroller dry-run``: its report, its JSON, its exit status, and what it rejects; and the fixture of pytest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcontroller.cli.main import main
from mcontroller.testing.pytest_plugin import DryRunFixture
from parallel_state.dry_run import DoesNotFit
from parallel_state.dry_run.outcome import CONTEXT, GIB
from tests.parallel_state.verify.programs import EXAMPLES

GPT = f"{EXAMPLES / 'gpt.py'}:program"
RUN = "examples/ppo/config.yaml"


@pytest.mark.simulated
def test_the_exit_status_is_whether_all_layouts_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "outcomes.json"
    arguments = ["dry-run", GPT, "--layouts", "tp=2", "pp=2", "--ranks", "4", "--json", str(file)]
    assert main([*arguments, "--gpu", "1"]) == 0
    written = json.loads(file.read_text())
    outcomes = written["outcomes"]
    assert written["fits"]
    assert list(outcomes) == ["tp=2", "pp=2"]
    for outcome in outcomes.values():
        assert (outcome["ranks"], outcome["gpu"], outcome["fits"]) == (4, GIB, True)
        assert outcome["peak"] == max(stage["peak"] for stage in outcome["stages"])
        assert outcome["failure"] == "" and outcome["communication"]
    assert main([*arguments, "--gpu", str((CONTEXT + outcomes["tp=2"]["peak"] - 1) / GIB)]) == 1
    printed = capsys.readouterr().out
    assert "DOES NOT FIT" in printed and not json.loads(file.read_text())["fits"]
    assert {len(line) for line in printed.splitlines() if "parameters" in line} == {98}


@pytest.mark.parametrize(
    "arguments",
    [
        [GPT, "--layouts", "tp=3"],
        [GPT, "--layouts", "tp=2", "--ranks", "7"],
        [GPT, "--layouts", "tp=2", "--ranks", "-4"],
        [GPT, "--layouts", "tp=2,dp=2", "--ranks", "8"],
        [GPT, "--micro-batches", "0"],
        [GPT, "--gpu", "H300"],
        [GPT, "--gpu", "-3"],
        [GPT, "--routing", "no_such_file.pt"],
        [GPT, "--json", "no/such/directory.json"],
        [GPT, "actor_rollout_ref.parallel.tp=2"],
        ["no_such_file.py:program"],
        [RUN, "--layouts", "tp=2"],
        [RUN, "--ranks", "8"],
    ],
)
def test_bad_input_is_one_line_and_failure(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dry-run", *arguments]) == 1
    printed = capsys.readouterr()
    (line,) = [line for line in printed.err.splitlines() if not line.startswith("dry run of ")]
    assert line.startswith("mcontroller dry-run: ") and not printed.out


@pytest.mark.simulated
def test_the_fixture_takes_the_name_of_a_program(dry_run: DryRunFixture) -> None:
    outcome = dry_run(GPT, "tp=2", ranks=4, micro_batches=1)
    assert (outcome.layout.dp, len(outcome.uses), outcome.warnings) == (2, 2, [])
    outcome.require_peak(outcome.peak)
    with pytest.raises(DoesNotFit) as error:
        outcome.require_peak(outcome.peak - 1)
    assert (error.value.peak, error.value.limit) == (outcome.peak, outcome.peak - 1)
