"""What a run says of itself when it begins and when it ends early."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
from pathlib import Path

import pytest
from rich.console import Console

from tests.trainer.run.test_check_run import config_file  # noqa: F401 - a fixture
from trainer.report.curves import draw_curves
from trainer.report.reading import last_step
from trainer.run import run_report
from trainer.run.config import read_run_config
from trainer.run.run_report import SUMMARY, RunReport, rows_of
from trainer.saving.run_record import RunRecord, RunState, SavedStep, write_record
from trainer.trackers import TRAIN


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
    saved = SavedStep({"actor": "actor/global_step_65"}, RunState(65, 0.0))
    write_record(tmp_path / "checkpoints", RunRecord(saved))
    report.end_early(67)
    assert printed.getvalue().endswith(f"step 65 of 120 is saved, 2 later steps are lost; continue with: {resume}")
    record = tmp_path / "checkpoints" / "trainer.json"
    whole = record.read_text()
    record.write_text(whole[:20])
    report.end_early(67)
    assert f"the record of the run, {record}, is damaged" in printed.getvalue().splitlines()[-1]
    record.write_text(whole)

    lines = [json.dumps({"global_step": step, "phase": TRAIN}) for step in (66, 67)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"global_st']))  # as a killed process leaves it
    resumed = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, resume=True))
    RunReport(tmp_path, resumed, Console(file=printed)).begin()
    assert printed.getvalue().endswith("resuming from step 65 of 120, saved 0 min ago; 2 later steps are lost\n")


def test_the_table_of_stages_has_no_negative_zero() -> None:
    assert rows_of({"reward": 0.1, "overlapped": -0.1, "update": 20.0}, 20.0) == [
        ("update", 20.0),
        ("reward", 0.1),
        ("other", 0.0),
    ]
    overlapped = {"reward": 9.0, "update": 20.0, "overlapped": -4.0}
    assert rows_of(overlapped, 26.0)[2:] == [("overlapped", -4.0), ("other", 1.0)]


def test_damaged_files_of_an_earlier_process_do_not_end_a_run(
    config_file: Path,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_report, "_commit", lambda: None)
    (tmp_path / "metrics.jsonl").write_bytes(b'[1]\n{"global_step": 3, "phase": "train"}\n{"a": 1}\n\xff\n')
    (tmp_path / SUMMARY).write_text('{"wall_s": 1')
    report = RunReport(tmp_path, read_run_config(config_file), Console(file=io.StringIO()))
    with caplog.at_level(logging.WARNING):
        report.begin()
    assert f"{tmp_path / SUMMARY} is damaged" in caplog.text and len(caplog.messages) == 1
    assert last_step(tmp_path / "metrics.jsonl") == 3
    (tmp_path / "warm_up.jsonl").write_text("""{"global_step": 9, "phase": "warm_up"}\n""")
    assert last_step(tmp_path / "warm_up.jsonl") == 0
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "metrics.jsonl").write_text(
        '{"global_step": 1, "phase": "train", "train/score": 0.5}\nnull\n{"a"'
    )
    assert draw_curves(tmp_path / "trained").is_file()
