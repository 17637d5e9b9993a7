"""What is resumed, and what is kept: the directories of a run as they were recorded, and its metrics."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from mcontroller.cli.main import INTERRUPTED, main
from mcontroller.errors import CallTimeout, ConfigError, DataError
from mcontroller.testing import is_late, mock_worker_group
from tests.trainer.run.test_check_run import config_file  # noqa: F401 - a fixture
from trainer.loop import RayPPOTrainer
from trainer.report.reading import read_run
from trainer.run import resume_verb, training
from trainer.run.config import read_run_config
from trainer.run.parts import make_parts
from trainer.run.pools import pools_of
from trainer.run.recorded_rows import RecordedRows
from trainer.run.resume_verb import config_of_run
from trainer.saving.run_record import RunRecord, RunState, SavedStep, read_record, write_record

LINES = {name: "".join(json.dumps({"global_step": step}) + "\n" for step in (1, 2)) for name in ("metrics", "samples")}
MakeRun = Callable[[str], Path]


@pytest.fixture
def make_run(tmp_path: Path, config_file: Path) -> MakeRun:  # noqa: F811
    def make(checkpoints: str) -> Path:
        """A run with metrics of two steps, whose saves are in a directory."""
        directory = tmp_path / "runs" / "first"
        directory.mkdir(parents=True)
        settings = [f"trainer.default_local_dir={checkpoints}", "pool.process_on_nodes=[4]"]
        config = read_run_config(config_file, settings).within(directory)
        (directory / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config))))
        for name, text in LINES.items():
            (directory / f"{name}.jsonl").write_text(text)
        return directory

    return make


def save(checkpoints: Path, step: int) -> None:
    checkpoints.mkdir(parents=True, exist_ok=True)
    saved = SavedStep({"actor": f"actor/global_step_{step}"}, RunState(step, 0.0))
    write_record(checkpoints, RunRecord(saved))


@pytest.mark.parametrize("place", ["checkpoints", "saves/all", "../saves", "ELSEWHERE"])
def test_saves_are_where_the_run_recorded_them(make_run: MakeRun, tmp_path: Path, place: str) -> None:
    run = make_run(place.replace("ELSEWHERE", str(tmp_path / "disk" / "checkpoints")))
    saves = Path(config_of_run(str(run), []).trainer.default_local_dir)
    assert saves == (tmp_path / "disk" / "checkpoints" if place == "ELSEWHERE" else (run / place).resolve())
    save(saves, 7)
    assert read_run(run).saved["global_steps"] == 7
    moved = run.rename(tmp_path / "moved")
    inside = not (place == "ELSEWHERE" or place.startswith(".."))
    assert config_of_run(str(moved), []).trainer.default_local_dir == str(moved / place if inside else saves)
    assert config_of_run(str(moved), []).run_dir == str(moved) and read_run(moved).saved["global_steps"] == 7
    given = config_of_run(str(moved), [f"trainer.default_local_dir={tmp_path}"])
    assert given.trainer.default_local_dir == str(tmp_path)


def test_a_text_that_looks_like_a_reference_is_recorded_as_it_is(make_run: MakeRun) -> None:
    run = make_run("checkpoints")
    text = "${price} \\\\${seed} \\\\"
    config = dataclasses.replace(config_of_run(str(run), []), experiment_name=text, trackers=["mlflow"])
    training.write_config(run, config)
    assert config_of_run(str(run), []).experiment_name == text


@pytest.mark.parametrize("lost", ["trainer.json", "the directory"])
def test_without_the_record_of_its_saves_a_run_is_not_begun_again(
    make_run: MakeRun, tmp_path: Path, lost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(str(tmp_path / "disk"))
    if lost == "trainer.json":
        (tmp_path / "disk" / "actor" / "global_step_2").mkdir(parents=True)
    assert main(["resume", str(run)]) == 1
    assert f"mcontroller resume: DataError: the run in {run} cannot be resumed" in capsys.readouterr().err
    assert {name: (run / f"{name}.jsonl").read_text() for name in LINES} == LINES
    with pytest.raises(DataError) as caught:
        training.train(config_of_run(str(run), ["trainer.resume=true"]), Console())
    assert caught.value.fields["saves"] == (["actor/global_step_2"] if lost == "trainer.json" else [])
    assert caught.value.fields["path"] == str(tmp_path / "disk" / "trainer.json")


def test_a_run_is_not_resumed_with_fewer_steps_than_it_has(make_run: MakeRun) -> None:
    run = make_run("checkpoints")
    save(run / "checkpoints", 7)
    with pytest.raises(ConfigError) as caught:
        training.train(config_of_run(str(run), ["trainer.resume=true", "trainer.total_training_steps=5"]), Console())
    assert (caught.value.fields["key"], caught.value.fields["value"]) == ("trainer.total_training_steps", 5)


@pytest.mark.parametrize(
    "override",
    [
        *("run_dir=x", "trainer.resume=false", "seed=1", "layout=2", "model.hf_path=x"),
        "actor_rollout_ref.model.num_attention_heads=8",  # the weights have the same shapes
    ],
)
def test_what_a_resumed_run_cannot_change_is_rejected_by_name(make_run: MakeRun, override: str) -> None:
    arguments = argparse.Namespace(directory=str(make_run("checkpoints")), overrides=[override])
    with pytest.raises(ConfigError) as caught:
        resume_verb.run(arguments)
    assert (caught.value.fields["key"], str(caught.value.fields["value"])) == tuple(override.split("="))


@pytest.mark.parametrize("again", ["trainer.resume=true", "trainer.asynchronous.replay={saves}"])
def test_a_run_goes_on_with_the_rows_that_it_began_with(make_run: MakeRun, again: str) -> None:
    run = make_run("checkpoints")
    config, saves = config_of_run(str(run), []), run / "checkpoints"
    file = Path(str(config.data.train.path))
    lines = [json.dumps({"prompt": f"{number}+1=", "answer": str(number + 1)}) + "\n" for number in range(4)]
    file.write_text("".join(lines))
    rows = RecordedRows(config, make_parts(config).prompts).state_dict()
    saves.mkdir()
    write_record(saves, RunRecord(SavedStep({}, RunState(7, 0.0, program={"data": rows}))))
    overrides = [again.format(saves=saves), "trainer.max_staleness=2", "rollout=${actor_rollout_ref}"]
    overrides += ["pool.process_on_nodes=[8]", "algorithm.importance.level=token"]
    added = '{"prompt": "9+9=", "answer": "18"}\n'
    resumed = config_of_run(str(run), overrides)
    assert RecordedRows(resumed, make_parts(resumed).prompts).state_dict() == rows
    for changed, count in (([*lines, added], 5), (lines[:-1], 3), ([*lines[:3], added], 4)):
        file.write_text("".join(changed))
        with pytest.raises(DataError) as caught:
            make_parts(resumed)
        assert (caught.value.fields["key"], caught.value.fields["rows"]) == ("data.train", count)
        assert caught.value.fields["expected"] == 4
    copy = file.with_name("copy.jsonl")
    copy.write_text(added * 5)
    assert len(make_parts(config_of_run(str(run), [*overrides, f"data.train.path={copy}"])).train) == 5


@pytest.mark.parametrize(("oldest", "resumes"), [(0, False), (3, True)])
def test_a_replay_begins_at_the_oldest_checkpoint_if_earlier_records_are_deleted(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, oldest: int, resumes: bool
) -> None:
    configs = []
    monkeypatch.setattr(training, "train", lambda config, console: configs.append(config))
    run = make_run("checkpoints")
    save(run / "checkpoints", 3)
    (run / "checkpoints" / "actor" / "global_step_3").mkdir(parents=True)
    (run / "checkpoints" / "trajectories").mkdir()
    (run / "checkpoints" / "trajectories" / f"{oldest:08d}.npz").touch()
    ahead = ["rollout=${actor_rollout_ref}", "trainer.max_staleness=2", "pool.process_on_nodes=[8]"]
    ahead += ["algorithm.importance.level=token", "trainer.total_training_steps=70"]
    assert main(["train", "--replay", str(run), *ahead]) == 0
    replay = Path(f"{run}-replay")
    [config] = configs
    assert config.trainer.total_training_steps == 70
    assert config.trainer.asynchronous.replay == str(run / "checkpoints") and config.run_dir == str(replay)
    assert config.trainer.resume == resumes == (replay / "checkpoints" / "actor" / "global_step_3").is_dir()
    if resumes:
        assert read_record(replay / "checkpoints").last.state.global_steps == 3


@pytest.mark.processes
def test_a_run_without_a_save_begins_again_and_keeps_its_metrics(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    run = make_run("checkpoints")
    (run / "checkpoints" / "actor" / ".saving-1a2b" / "global_step_1").mkdir(
        parents=True
    )  # a save that was interrupted
    monkeypatch.setattr(training, "start_ray", interrupted)
    assert main(["resume", str(run)]) == INTERRUPTED
    assert "no step of the run is saved: it begins again" in capsys.readouterr().out.replace("\n", " ")
    for name in LINES:
        assert not (run / f"{name}.jsonl").exists()


@pytest.mark.processes
def test_an_interrupt_while_a_run_ends_leaves_nothing_of_it(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    def shutdown() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        ended.append(True)

    run = make_run("checkpoints")
    (run / "checkpoints").mkdir()
    monkeypatch.setattr(training, "start_ray", lambda config: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(training.ray, "shutdown", shutdown)
    assert main(["resume", str(run)]) == training.INTERRUPTED
    assert ended == [True] and not (run / training.LOCK).exists()


def test_a_new_run_is_not_saved_over_another_one(config_file: Path, tmp_path: Path) -> None:  # noqa: F811
    save(tmp_path / "shared", 5)
    config = read_run_config(
        config_file, [f"trainer.default_local_dir={tmp_path / 'shared'}", f"run_dir={tmp_path / 'second'}"]
    )
    with pytest.raises(ConfigError) as caught:
        training.train(config, Console())
    assert caught.value.fields["key"] == "trainer.default_local_dir"


def test_a_call_of_a_run_that_hangs_fails_after_the_timeout_of_its_role(config_file: Path, tmp_path: Path) -> None:  # noqa: F811
    settings = ["actor_rollout_ref.timeout_s=9", "actor_rollout_ref.parallel.tp=1", "pool.process_on_nodes=[2]"]
    config = read_run_config(config_file, settings).within(tmp_path)
    parts = make_parts(config)
    trainer = RayPPOTrainer(
        config,
        parts.tokenizer,
        parts.roles,
        pools_of(config, parts.roles),
        lambda pool, init, name_prefix: mock_worker_group(init, 2, name=name_prefix, failures={1: is_late(10.0)}),
        parts.rewards,
        train_dataset=parts.train,
    )
    with trainer, closing(parts), pytest.raises(CallTimeout) as caught:
        trainer.init_workers()
    assert (caught.value.role, caught.value.ranks, caught.value.timeout) == ("actor", (1,), 9.0)
