"""``mcontroller dry-run``: its report, its JSON, its exit status, and what it rejects; and the fixture of pytest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcontroller.cli.main import INTERRUPTED, USAGE_ERROR, main
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
        [GPT, "--routing", "examples/verify/gpt.py"],
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


@pytest.mark.parametrize("file", ["no/such/directory.json", "examples"])
def test_a_file_that_cannot_be_written_is_an_error_of_the_command_line(file: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["dry-run", GPT, "--json", file])
    assert ended.value.code == USAGE_ERROR


PROGRAM = """
import sys
from dataclasses import replace
from examples.verify.gpt import program as gpt

class Failing:
    def __init__(self, error): self.error = error
    def __call__(self, *args): raise self.error

raises, interrupted, ends = (
    replace(gpt, forward_step=Failing(error)) for error in (ValueError("mine"), KeyboardInterrupt(), SystemExit(3))
)
nothing = replace(gpt, model_provider=lambda *args: None)
"""


@pytest.mark.simulated
def test_whatever_a_program_raises_is_one_error_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    texts = {"failing_gpt": PROGRAM, "no_syntax": "def (", "no_import": "import no_such_module"}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)

    def ended(name: str) -> tuple[int, str, str]:
        status = main(["dry-run", str(tmp_path / name)])
        return status, *capsys.readouterr()

    for name, error in {"raises": "ValueError: mine", "ends": "called sys.exit(3)"}.items():
        status, out, _ = ended(f"failing_gpt.py:{name}")
        assert status == 1 and error in out and "failing_gpt.py:8 in __call__" in out
    for name in ("no_syntax.py:x", "no_import.py:x", "failing_gpt.py:nothing"):
        status, out, errors = ended(name)
        assert (status, out) == (1, "") and "VerifyError" in errors and "Traceback" not in errors
    status, out, errors = ended("failing_gpt.py:interrupted")
    assert (status, out) == (INTERRUPTED, "") and "Traceback" not in errors


@pytest.mark.simulated
def test_the_fixture_takes_the_name_of_a_program(dry_run: DryRunFixture) -> None:
    outcome = dry_run(GPT, "tp=2", ranks=4, micro_batches=1)
    assert (outcome.layout.dp, len(outcome.uses), outcome.warnings) == (2, 2, [])
    outcome.require_peak(outcome.peak)
    with pytest.raises(DoesNotFit) as error:
        outcome.require_peak(outcome.peak - 1)
    assert (error.value.peak, error.value.limit) == (outcome.peak, outcome.peak - 1)
