from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mcontroller.errors import ConfigError
from trainer.trackers import Run, make_trackers

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
    records = [json.loads(line) for line in lines]
    assert [abs(record.pop("time") - time.time()) < 60 for record in records] == [True, True]
    assert records == [{"global_step": step, "phase": "train", **metrics} for step, metrics in STEPS]


def test_tensorboard_reads_back_what_was_logged(tmp_path):
    log_steps(["tensorboard"], Run(tmp_path))  # and not closed: the run is killed
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/score")] == [(1, 0.25), (2, 0.5)]


def test_a_resumed_run_keeps_its_warm_up(tmp_path):
    for resumed_at, phase, steps in ((None, "warm_up", (1, 2, 3)), (None, "train", (1, 2)), (1, "train", (2, 3))):
        (tracker,) = make_trackers(["tensorboard"], Run(tmp_path, resumed_at=resumed_at))
        for step in steps:
            tracker.log({"loss": float(step)}, step, phase)
        tracker.close()
    for directory in ("tensorboard/warm_up", "tensorboard"):
        events = EventAccumulator(str(tmp_path / directory)).Reload()
        assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]


SAMPLES = [{"prompt": "1 | 1\n=", "response": "2", "score": 1.0}, {"prompt": "2", "response": "?", "score": None}]


def test_samples_are_a_table_in_the_run_directory_and_in_every_tracker(tmp_path, monkeypatch):
    logged = []
    wandb_run = SimpleNamespace(log=logged.append)
    wandb = SimpleNamespace(init=lambda **given: wandb_run, Table=lambda columns, data: (columns, data))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for tracker in make_trackers(["jsonl", "tensorboard", "wandb"], Run(tmp_path, name="try")):
        tracker.log_samples(SAMPLES, 3)
        if not hasattr(tracker, "_wandb"):
            tracker.close()
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert lines == [{"global_step": 3, **sample} for sample in SAMPLES]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (event,) = events.Tensors("samples/text_summary")
    assert event.step == 3 and b"| 1 \\| 1<br>= | 2 | 1.0 |" in event.tensor_proto.string_val[0]
    columns, rows = logged[0]["samples"]
    assert columns == ["prompt", "response", "score"] and rows[1] == ["2", "?", None] and logged[0]["global_step"] == 3


def test_a_resumed_run_has_no_step_twice(tmp_path):
    lines = [{"global_step": 7, "sft/loss": 1.0}, *({"global_step": step} for step in range(4))]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"global_step": 4, "trai')
    for tracker in make_trackers(["jsonl"], Run(tmp_path, resumed_at=1)):
        tracker.log({"train/score": 1.0}, 2)
        tracker.close()
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kept[:3] == lines[:3]
    assert kept[3] | {"time": 0} == {"global_step": 2, "phase": "train", "time": 0, "train/score": 1.0}


def test_a_resumed_run_continues_the_run_of_its_service(tmp_path, monkeypatch):
    started = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **given: started.append(given)))
    service = SimpleNamespace(
        set_experiment=lambda name: None,
        start_run=lambda **given: started.append(given) or SimpleNamespace(info=SimpleNamespace(run_id="abc")),
        log_params=lambda params: None,
    )
    monkeypatch.setitem(sys.modules, "mlflow", service)
    for resumed_at in (None, 5):
        make_trackers(["wandb", "mlflow"], Run(tmp_path, name="r", resumed_at=resumed_at))
    assert started[0]["id"] == started[2]["id"] and started[2]["resume"] == "allow"
    assert started[1] == {"run_name": "r"} and started[3] == {"run_id": "abc"}


def test_a_service_that_is_not_installed_is_rejected_with_the_extra_to_install(tmp_path, monkeypatch):
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ConfigError) as caught:
            make_trackers(["jsonl", name], Run(tmp_path))
        assert (caught.value.key, caught.value.value) == ("trackers", name)
        assert not [*tmp_path.iterdir()]  # the directory of another run would be rejected


def test_mlflow_gets_the_configuration_under_dotted_names(tmp_path, monkeypatch):
    recorded = {}
    service = SimpleNamespace(
        set_experiment=lambda name: recorded.update(experiment=name),
        start_run=lambda run_name: recorded.update(run=run_name) or SimpleNamespace(info=SimpleNamespace(run_id="1")),
        log_params=recorded.update,
        log_metrics=lambda metrics, step: recorded.update({step: metrics}),
    )
    monkeypatch.setitem(sys.modules, "mlflow", service)
    log_steps(["mlflow"], Run(tmp_path, project="p", name="r", config={"a": {"b": 1}, "c": 2}))
    assert recorded == {"experiment": "p", "run": "r", "a.b": 1, "c": 2, **dict(STEPS)}


def test_an_unknown_tracker_is_rejected_before_any_is_created(tmp_path):
    with pytest.raises(
        ConfigError,
    ) as caught:
        make_trackers(["jsonl", "jsonlines"], Run(tmp_path / "run"))
    assert (caught.value.key, caught.value.value) == ("trackers", "jsonlines")
    assert not (tmp_path / "run").exists()
