"""What a run says of itself when it begins and when it ends early."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from mcontroller.ppo.saving.run_record import RunRecord, SavedStep, write_record
from tests.workers.run.test_check_run import config_file  # noqa: F401 - a fixture
from workers.run.config import read_run_config
from workers.run.run_report import SUMMARY, RunReport


@pytest.mark.processes
def test_a_run_says_what_started_it_what_is_saved_and_how_to_go_on(config_file: Path, tmp_path: Path) -> None:  # noqa: F811
    printed = io.StringIO()
    checkpoints = f"trainer.default_local_dir={tmp_path / 'checkpoints'}"
    config = read_run_config(config_file, [checkpoints, "trainer.total_training_steps=120"])
    report = RunReport(tmp_path, config, Console(file=printed))
    report.begin()
    [process] = json.loads((tmp_path / SUMMARY).read_text())["processes"]
    assert {"command", "commit", "versions", "host", "started"} <= process.keys()
    assert process["host"] in printed.getvalue() and f"torch {process['versions']['torch']}" in printed.getvalue()

    resume = f"python -m mcontroller resume {tmp_path}\n"
    report.end_early(7)
    assert printed.getvalue().endswith(f"no step is saved, 7 are lost; begin again with: {resume}")
    (tmp_path / "checkpoints").mkdir()
    saved = SavedStep(65, 0.0, {"actor": "actor/global_step_65"})
    write_record(tmp_path / "checkpoints", RunRecord(saved))
    report.end_early(67)
    assert printed.getvalue().endswith(f"step 65 of 120 is saved, 2 later steps are lost; continue with: {resume}")
