from __future__ import annotations

import json
import logging
import sys
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mcontroller.errors import ConfigError
from mcontroller.trackers import Run, make_trackers

STEPS = [(1, {"train/score": 0.25, "actor/lr": 1e-3}), (2, {"train/score": 0.5, "actor/lr": 2e-3})]


def log_steps(names, run):
    trackers = make_trackers(names, run)
    for step, metrics in STEPS:
        for tracker in trackers:
            tracker.log(metrics, step)
    return trackers


def test_json_lines_hold_every_step_as_soon_as_it_is_logged(tmp_path):
    log_steps(["jsonl"], Run(tmp_path / "new" / "run"))
    lines = (tmp_path / "new" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": step, **metrics} for step, metrics in STEPS]


def test_tensorboard_reads_back_what_was_logged(tmp_path):
    for tracker in log_steps(["tensorboard"], Run(tmp_path)):
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/score")] == [(1, 0.25), (2, 0.5)]


def test_the_console_tracker_writes_a_line_a_step_to_the_log(tmp_path, caplog):
    caplog.set_level(logging.INFO, "mcontroller.trackers")
    log_steps(["console"], Run(tmp_path, name="try"))
    assert caplog.messages[1] == "try step 2: train/score=0.5 actor/lr=0.002"


def test_a_service_that_is_not_installed_is_rejected_with_the_extra_to_install(tmp_path, monkeypatch):
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ConfigError, match=rf"pip install 'mcontroller\[{name}\]'"):
            make_trackers([name], Run(tmp_path))


def test_mlflow_gets_the_configuration_under_dotted_names(tmp_path, monkeypatch):
    recorded = {}
    service = SimpleNamespace(
        set_experiment=lambda name: recorded.update(experiment=name),
        start_run=lambda run_name: recorded.update(run=run_name),
        log_params=recorded.update,
        log_metrics=lambda metrics, step: recorded.update({step: metrics}),
    )
    monkeypatch.setitem(sys.modules, "mlflow", service)
    log_steps(["mlflow"], Run(tmp_path, project="p", name="r", config={"a": {"b": 1}, "c": 2}))
    assert recorded == {"experiment": "p", "run": "r", "a.b": 1, "c": 2, **dict(STEPS)}


def test_an_unknown_tracker_is_rejected_before_any_is_created(tmp_path):
    with pytest.raises(
        ConfigError,
        match="trackers is 'jsonlines', and there is no such tracker: did you mean jsonl",
    ):
        make_trackers(["jsonl", "jsonlines"], Run(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
