"""The record of a run: what is resumed, what is kept, and damaged records and checkpoints."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mcontroller.data.batch import DataProto
from mcontroller.errors import ConfigError, DataError
from tests.trainer.toy import toy_config, toy_trainer
from trainer import Callback, Display, Reward
from trainer.saving.run_record import read_record
from trainer.trackers import Run, Tracker, make_trackers


def trained(directory: Path, steps: int, trackers: Sequence[Tracker] = (), **trainer: Any) -> Any:
    config = toy_config(steps, default_local_dir=str(directory), **trainer)
    made = toy_trainer(config, val_dataset=None, trackers=trackers)
    made.init_workers()
    made.fit()
    return made


def resumable(directory: Path) -> Any:
    made = toy_trainer(toy_config(1, default_local_dir=str(directory), resume=True))
    made.init_workers()
    return made


def kept(directory: Path) -> list[list[str]]:
    return [sorted(entry.name for entry in (directory / group).glob("global_step_*")) for group in ("actor", "critic")]


def test_every_group_keeps_the_same_steps(tmp_path: Path) -> None:
    trained(tmp_path, 4, save_freq=1, max_to_keep=2)
    assert kept(tmp_path) == [["global_step_3", "global_step_4"]] * 2
    assert [save.state.global_steps for save in read_record(tmp_path).saves()] == [4, 3]


class Values:
    """A reward of held-out problems that has a value for each validation."""

    def __init__(self, *values: float | None) -> None:
        self.values = list(values)

    def __call__(self, batch: DataProto) -> Reward:
        value = self.values.pop(0)
        length = len(batch)
        return Reward(torch.zeros(length, 1), {} if value is None else {"right": [value] * length})


def of_values(directory: Path, steps: int, *values: float | None, **trainer: Any) -> Any:
    options: dict[str, Any] = {
        "save_freq": 1,
        "test_freq": 1,
        "val_before_train": False,
        "max_to_keep": 1,
        "keep_best": 2,
    }
    options |= {"best_metric": "held_out/right", "default_local_dir": str(directory)}
    config = toy_config(steps, **options | trainer)
    made = toy_trainer(config, val_reward_fn=Values(*values))
    made.init_workers()
    made.fit()
    return made


def test_the_best_checkpoints_are_kept_besides_the_newest(tmp_path: Path) -> None:
    of_values(tmp_path, 5, 0.4, 0.9, 0.1, 0.6, 0.2)
    assert kept(tmp_path) == [["global_step_2", "global_step_4", "global_step_5"]] * 2
    states = [save.state for save in read_record(tmp_path).saves()]
    assert [(state.global_steps, state.value) for state in states] == [(5, 0.2), (4, 0.6), (2, 0.9)]
    again = of_values(tmp_path, 7, 0.7, 0.3, resume=True)
    assert again.global_steps == 7 and kept(tmp_path)[0] == ["global_step_2", "global_step_6", "global_step_7"]
    damaged = tmp_path / "actor" / "global_step_7" / "state.npz"
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert resumable(tmp_path).load_checkpoint() == 6
    of_values(tmp_path, 9, 0.1, 0.0, 0.0, resume=True, best_metric="held_out/score", keep_best=1)
    assert kept(tmp_path)[0] == ["global_step_9"]  # values of another metric are not compared


def test_the_best_value_may_be_the_least_and_equal_ones_are_the_newest(tmp_path: Path) -> None:
    of_values(tmp_path, 5, 0.4, 0.1, 0.9, 0.1, 0.3, best_mode="min", keep_best=1)
    assert kept(tmp_path)[0] == ["global_step_4", "global_step_5"]


def test_a_step_without_a_finite_value_is_not_among_the_best(tmp_path: Path) -> None:
    of_values(tmp_path, 4, 0.4, math.inf, math.nan, 0.1, max_to_keep=2, keep_best=1)
    assert kept(tmp_path)[0] == ["global_step_1", "global_step_3", "global_step_4"]
    assert [save.state.value for save in read_record(tmp_path).saves()] == [0.1, None, 0.4]


def test_a_best_metric_that_validation_does_not_have_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        of_values(tmp_path, 1, 0.5, best_metric="held_out/rigt")
    assert caught.value.key == "trainer.best_metric"
    for options in ({"save_freq": 0}, {"test_freq": 0}, {"save_freq": 3, "test_freq": 2}, {"max_to_keep": None}):
        with pytest.raises(ConfigError) as caught:
            of_values(tmp_path, 1, 0.5, **options)
        assert caught.value.key.removeprefix("trainer.") == "keep_best"
    with pytest.raises(ConfigError) as caught:
        trained(tmp_path, 1, save_freq=1, test_freq=1, keep_best=1)
    assert caught.value.key == "trainer.keep_best"  # no held-out problems


def test_steps_of_an_earlier_run_that_went_further_are_not_deleted(tmp_path: Path) -> None:
    trained(tmp_path, 4, save_freq=2)
    trained(tmp_path, 1, save_freq=0, max_to_keep=1)
    assert kept(tmp_path) == [["global_step_1", "global_step_2", "global_step_4"]] * 2
    assert [save.state.global_steps for save in read_record(tmp_path).saves()] == [1]


def test_a_damaged_checkpoint_of_one_group_takes_all_to_an_earlier_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path, 4, save_freq=1)
    for step in (3, 4):
        state = tmp_path / "critic" / f"global_step_{step}" / "state.npz"
        state.write_bytes(state.read_bytes()[:100])
    trainer = resumable(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert trainer.load_checkpoint() == 2
    assert "the checkpoint of step 3 is damaged, all groups use an earlier one: critic: " in caplog.text
    two = trained(tmp_path / "two", 2)
    for group in ("actor", "critic"):
        loaded, expected = (run.groups[group].workers[0].table for run in (trainer, two))
        assert loaded.equal(expected)
    went_on = trained(tmp_path, 3, save_freq=0, resume=True)
    assert went_on.global_steps == 3 and resumable(tmp_path).load_checkpoint() == 3
    assert kept(tmp_path) == [["global_step_2", "global_step_3"]] * 2  # and not the damaged one of a later step


def steps_in(file: Path) -> list[int]:
    return [json.loads(line)["global_step"] for line in file.read_text().splitlines()]


@pytest.mark.parametrize("ends_at", [1, 2])
def test_a_run_that_ends_right_after_a_save_has_a_line_for_every_step(tmp_path: Path, ends_at: int) -> None:
    class Ends(Callback):
        def saved(self, trainer: Any, directory: str) -> None:
            if trainer.global_steps == ends_at:
                trainer.checkpoints.finish()
                raise KeyboardInterrupt

    def run(callbacks: Sequence[Callback], **options: Any) -> None:
        config = toy_config(2, save_freq=1, default_local_dir=str(tmp_path / "saves"), **options)
        trackers = make_trackers(["jsonl"], Run(tmp_path, resumed_at=ends_at if options else None))
        with toy_trainer(config, val_dataset=None, trackers=trackers, callbacks=callbacks) as trainer:
            trainer.init_workers()
            trainer.fit()

    with pytest.raises(KeyboardInterrupt):
        run([Ends()])
    run([], resume=True)
    assert steps_in(tmp_path / "metrics.jsonl") == [0, 1, 2]


class Texts(Display):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def starting(self, what: str) -> None:
        self.texts.append(what)


def test_after_a_damaged_save_metrics_go_back_to_the_save_that_was_loaded(tmp_path: Path) -> None:
    saves, trackers = tmp_path / "saves", make_trackers(["jsonl", "tensorboard"], Run(tmp_path))
    trained(saves, 4, trackers=trackers, save_freq=2)
    for step in range(1, 5):
        trackers[0].log_samples([{"prompt": "a"}], step)
    files = [tmp_path / "metrics.jsonl", tmp_path / "samples.jsonl"]
    (saves / "critic" / "global_step_4" / "state.npz").unlink()
    display, resumed = Texts(), make_trackers(["jsonl", "tensorboard"], Run(tmp_path, resumed_at=4))
    config = toy_config(6, default_local_dir=str(saves), save_freq=6, max_to_keep=2, resume=True)
    with toy_trainer(config, val_dataset=None, trackers=resumed, display=display) as trainer:
        trainer.init_workers()
        assert trainer.load_checkpoint() == 2
        assert steps_in(files[0]) == [0, 1, 2] and steps_in(files[1]) == [1, 2]
        trainer.fit()
    assert steps_in(files[0]) == [0, 1, 2, 3, 4, 5, 6]
    assert [text for text in display.texts if "step 4 is damaged (critic: " in text and "from step 2" in text]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/score")] == [1, 2, 3, 4, 5, 6]
    steps = [save.state.global_steps for save in read_record(saves).saves()]
    assert steps == [6, 2]  # and not the damaged one of step 4
    assert kept(saves) == [["global_step_2", "global_step_6"]] * 2


def test_without_a_whole_save_metrics_stay_as_they_are(tmp_path: Path) -> None:
    saves = tmp_path / "saves"
    trained(saves, 3, trackers=make_trackers(["jsonl"], Run(tmp_path)), save_freq=2)
    for state in saves.glob("critic/*/state.npz"):
        state.unlink()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    resumed = make_trackers(["jsonl"], Run(tmp_path, resumed_at=2))
    with toy_trainer(toy_config(4, default_local_dir=str(saves), resume=True), trackers=resumed) as trainer:
        trainer.init_workers()
        with pytest.raises(DataError) as caught:
            trainer.fit()
        assert caught.value.path == str(saves)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_without_a_whole_checkpoint_nothing_is_loaded(tmp_path: Path) -> None:
    trained(tmp_path, 2, save_freq=1)
    for state in tmp_path.glob("critic/*/state.npz"):
        state.unlink()
    trainer = resumable(tmp_path)
    before = trainer.groups["actor"].workers[0].table.clone()
    with pytest.raises(DataError) as caught:
        trainer.load_checkpoint()
    assert list(caught.value.damaged) == [2, 1]
    assert trainer.groups["actor"].workers[0].table.equal(before)


SAVE: dict[str, Any] = {
    **{"global_steps": 2, "kl_coef": 0.1, "drawn_batches": 2, "num_tokens": 0, "next_row": 8, "batch_size": 4},
    **{"program": {}, "rollout": {}, "in_flight": [], "groups": {"actor": "actor/global_step_2"}},
}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "JSONDecodeError"),
        ("\x00\xff", "UnicodeDecodeError"),
        ("[" * 100_000, "RecursionError"),
        ("[]", "'list' object"),
        (json.dumps(SAVE | {"global_steps": True}), "global_steps is True"),
        (json.dumps(SAVE | {"global_steps": -1}), "global_steps is -1"),
        (json.dumps(SAVE | {"kl_coef": None}), "NoneType"),
        (json.dumps(SAVE | {"groups": ["actor"]}), "'list' object"),
        (json.dumps(SAVE | {"groups": {"actor": 3}}), "groups has 3"),
        (json.dumps(SAVE | {"groups": {"actor": "../other"}}), "groups has '../other'"),
        (json.dumps(SAVE | {"groups": {"actor": "\ud800"}}), "UnicodeEncodeError"),
        (json.dumps(SAVE | {"obsolete": ["/"]}), "obsolete has '/'"),
        (json.dumps(SAVE | {"staged": "../actor"}), "staged is '../actor'"),
        (json.dumps(SAVE | {"staged": {"actor": "x"}}), "TypeError"),
        (json.dumps(SAVE | {"earlier": [None]}), "NoneType"),
    ],
)
def test_a_damaged_record_is_rejected_with_its_value(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "trainer.json").write_text(content, encoding="latin-1")
    with pytest.raises(DataError) as caught:
        toy_trainer(toy_config(1, default_local_dir=str(tmp_path), resume=True))
    assert "trainer.json, is damaged" in str(caught.value) and reason in str(caught.value)


@pytest.mark.parametrize("place", ["actor/link", "actor/link/kept", "link/kept"])
@pytest.mark.parametrize("key", ["obsolete", "groups"])
def test_a_link_out_of_the_run_is_rejected_and_nothing_there_is_deleted(tmp_path: Path, place: str, key: str) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    trained(run, 1, save_freq=1)
    (outside / "kept" / "files").mkdir(parents=True)
    for link in (run / "link", run / "actor" / "link"):
        link.symlink_to(outside)
    record = json.loads((run / "trainer.json").read_text())
    paths = record["groups"] | {"actor": place}
    record[key] = [place] if key == "obsolete" else paths
    (run / "trainer.json").write_text(json.dumps(record))
    with pytest.raises(DataError) as caught:
        trained(run, 2, save_freq=1, resume=True)
    assert caught.value.path == str(run / "trainer.json")
    assert [entry.name for entry in outside.rglob("*")] == ["kept", "files"]


def test_a_group_that_saves_through_a_link_out_of_the_run_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "critic").symlink_to(tmp_path)
    with pytest.raises(DataError) as caught:
        trained(tmp_path / "run", 1, save_freq=1)
    assert caught.value.path == str(tmp_path)
    assert list((tmp_path / "run").iterdir()) == [tmp_path / "run" / "critic"]
