"""The batch in flight belongs to the checkpoint: a resumed run equals one without an interruption, bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import DataError, WorkerError
from tests.trainer.separate import SEPARATE, SeparateActor
from tests.trainer.toy import problems, toy_config, toy_trainer
from trainer import (
    AlgorithmConfig,
    Callback,
    DataConfig,
    FilterGroupsConfig,
    ImportanceConfig,
    KLControlConfig,
    PPOConfig,
    RayPPOTrainer,
    Role,
    ValidationConfig,
)
from trainer.saving.preemption import Preempted
from trainer.saving.run_record import RunRecord, RunState, SavedStep, read_record, write_record

TOKEN = ImportanceConfig(level="token")
ADAPTIVE = AlgorithmConfig(kl_ctrl=KLControlConfig(type="adaptive", kl_coef=0.1, horizon=100), importance=TOKEN)
DYNAMIC = AlgorithmConfig(
    adv_estimator="rloo",
    use_kl_in_reward=False,
    importance=TOKEN,
    filter_groups=FilterGroupsConfig(enable=True, max_batches=3),
)
NOT_COMPARED = ("timing_s", "perf", "memory")


class Stops(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def step_ended(self, trainer: Any, metrics: dict[str, float]) -> None:
        if trainer.global_steps == self.step:
            trainer.stop()


class Signals(Callback):
    """Sends SIGTERM to the run during step 3."""

    def batch_ready(self, trainer: Any, batch: DataProto) -> None:
        if trainer.global_steps == 2:
            os.kill(os.getpid(), signal.SIGTERM)


class Twice(SeparateActor):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        prompts.meta_info.setdefault("n", 2)
        return super().generate_sequences(prompts)


TWICE = {**SEPARATE, Role.Rollout: Twice}


def config_of(directory: Path, rule: AlgorithmConfig, steps: int, **trainer: Any) -> PPOConfig:
    made = toy_config(steps, **{"max_staleness": 1, "default_local_dir": str(directory), "save_freq": 0, **trainer})
    return dataclasses.replace(made, rollout=0.5, ref=0.5, algorithm=rule)


def started(config: PPOConfig, roles: dict[Role, Any] = TWICE, **others: Any) -> tuple[RayPPOTrainer, list[dict]]:
    lines: list[dict[str, float]] = []
    tracker = type("Lines", (), {"log": lambda self, metrics, *_: lines.append(dict(metrics))})()
    tracker.log_samples = lambda *_: None
    trainer = toy_trainer(config, roles, trackers=[tracker], **others)
    trainer.init_workers()
    return trainer, lines


def fitted(config: PPOConfig, roles: dict[Role, Any] = TWICE, **others: Any) -> tuple[RayPPOTrainer, list[dict]]:
    trainer, lines = started(config, roles, **others)
    trainer.fit()
    return trainer, lines


def numbers(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: line[name] for name in line if name.split("/")[0] not in NOT_COMPARED} for line in lines]


@pytest.mark.parametrize(
    ("rule", "stopped_by", "staleness"),
    [
        pytest.param(ADAPTIVE, "the total", 0, id="gae-the total-0"),
        pytest.param(ADAPTIVE, "stop()", 1, id="gae-stop()-1"),
        pytest.param(ADAPTIVE, "SIGTERM", 1, id="gae-SIGTERM-1"),
        pytest.param(DYNAMIC, "SIGTERM", 0, id="dynamic sampling-SIGTERM-0"),
        pytest.param(DYNAMIC, "the total", 1, id="dynamic sampling-the total-1"),
    ],
)
def test_weights_and_metrics_equal_those_of_a_run_that_was_not_interrupted(
    tmp_path: Path, rule: AlgorithmConfig, stopped_by: str, staleness: int
) -> None:
    """Held-out problems are sampled too: the state of sampling of the rollout group is in the checkpoint."""

    def config(name: str, steps: int, **trainer: Any) -> PPOConfig:
        settings = {"max_staleness": staleness, "test_freq": 1, "val_before_train": False, **trainer}
        made = config_of(tmp_path / name, rule, steps, **settings)
        return dataclasses.replace(made, validation=ValidationConfig(n=2, do_sample=True))

    whole, of_whole = fitted(config("whole", 6))
    callbacks = {"the total": [], "stop()": [Stops(3)], "SIGTERM": [Signals()]}[stopped_by]
    stopped, first = started(config("parts", 6 if callbacks else 3), callbacks=callbacks)
    with pytest.raises(Preempted) if stopped_by == "SIGTERM" else contextlib.nullcontext():
        stopped.fit()
    resumed, second = fitted(config("parts", 6, resume=True))
    assert len(first) == len(second) == 3 and resumed.global_steps == 6
    assert numbers(first + second) == numbers(of_whole)
    for name in ("actor", "critic") if rule is ADAPTIVE else ("actor",):
        assert resumed.groups[name].workers[0].table.equal(whole.groups[name].workers[0].table)
    assert resumed.problems.count == whole.problems.count
    if staleness:
        assert [line["training/staleness_max"] for line in second] == [1.0] * 3


def test_the_batch_in_flight_is_recorded_kept_and_deleted_with_its_step(tmp_path: Path) -> None:
    fitted(config_of(tmp_path, ADAPTIVE, 4, save_freq=1, max_to_keep=2))
    last, earlier = read_record(tmp_path).saves()
    assert [[batch.number for batch in save.in_flight] for save in (last, earlier)] == [[4], [3]]
    assert (last.state.drawn_batches, last.state.rollout) == (5, {"samples": 5})
    kept = sorted(str(path.relative_to(tmp_path / "in_flight")) for path in (tmp_path / "in_flight").rglob("*.*"))
    assert kept == ["global_step_3/batch_3.pt", "global_step_4/batch_4.pt"]


def test_a_damaged_batch_in_flight_takes_all_groups_to_the_step_before(tmp_path: Path) -> None:
    fitted(config_of(tmp_path, ADAPTIVE, 3, save_freq=1))
    path = tmp_path / "in_flight" / "global_step_3" / "batch_3.pt"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    trainer, _ = started(config_of(tmp_path, ADAPTIVE, 4, resume=True))
    assert trainer.load_checkpoint() == 2
    assert list(trainer.checkpoints.damaged) == [3] and str(path) in trainer.checkpoints.damaged[3]
    path.unlink()
    record = json.loads((tmp_path / "trainer.json").read_text())
    (tmp_path / "trainer.json").write_text(json.dumps({**record, "earlier": []}))
    with pytest.raises(DataError) as raised:
        trainer.load_checkpoint()
    assert list(raised.value.damaged) == [3]


@pytest.mark.parametrize(
    "content",
    [
        7,
        [7],
        [{"number": 1}],
        [{"number": 1, "sha256": "2", "rows": 3}],
    ],
)
def test_a_damaged_record_of_batches_in_flight_is_reported(tmp_path: Path, content: Any) -> None:
    write_record(tmp_path, RunRecord(SavedStep({"actor": "actor/global_step_1"}, RunState(1, 0.0))))
    record = json.loads((tmp_path / "trainer.json").read_text())
    (tmp_path / "trainer.json").write_text(json.dumps(record | {"in_flight": content}))
    with pytest.raises(DataError) as caught:
        read_record(tmp_path)
    assert caught.value.path == str(tmp_path / "trainer.json")


def test_a_run_may_resume_with_another_staleness(tmp_path: Path) -> None:
    """On policy again, the batch in flight is dropped and its problems are drawn again."""
    fitted(config_of(tmp_path, ADAPTIVE, 2))
    on_policy, lines = fitted(config_of(tmp_path, ADAPTIVE, 4, resume=True, max_staleness=0))
    assert on_policy.problems.count == 4 and "training/staleness_max" not in lines[-1]
    off_policy, lines = fitted(config_of(tmp_path, ADAPTIVE, 6, resume=True))
    assert off_policy.problems.count == 7
    assert [line["training/staleness_max"] for line in lines if line.get("train/score")] == [0.0, 1.0]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_that_resumes_with_another_batch_size_repeats_no_row(tmp_path: Path, staleness: int) -> None:
    """96 rows: 48 in a step of the first run, then two steps of 24, then one of 48 of the next pass."""
    read: list[int] = []

    def numbered(batch: DataProto) -> list[float]:
        read.extend(batch.non_tensor_batch["row"][::2])
        return [0.0] * len(batch)

    rows = [{**problem, "row": row} for row, problem in enumerate(problems(96))]
    for steps, size in ((1, 48), (3, 24), (4, 48)):
        config = config_of(tmp_path, ADAPTIVE, steps, resume=steps > 1, max_staleness=staleness)
        config = dataclasses.replace(config, data=DataConfig(train_batch_size=size))
        last, lines = fitted(config, train_dataset=rows, val_dataset=None, reward_fn=numbered)
    assert sorted(read[:96]) == list(range(96)) and len(set(read[96:])) == 48
    assert [line["train/epoch"] for line in lines] == [1.5]
    assert last.train_batches.position(last.problems.count - staleness) == 144


def test_a_step_is_saved_without_a_batch_in_flight_that_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Twice):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
        def generate_sequences(self, prompts: DataProto) -> DataProto:
            if self.version == 1:
                raise ValueError("out of memory")
            return super().generate_sequences(prompts)

    class Saves(Callback):
        def step_ended(self, trainer: Any, metrics: dict[str, float]) -> None:
            if trainer.global_steps == 2:
                trainer.save_checkpoint()

    roles = {**SEPARATE, Role.Rollout: Failing}
    trainer, _ = started(config_of(tmp_path, ADAPTIVE, 5), roles, val_dataset=None, callbacks=[Saves()])
    with pytest.raises(WorkerError) as caught, caplog.at_level(logging.WARNING):
        trainer.fit()
    assert (caught.value.role, caught.value.rank, caught.value.coordinates) == ("rollout", 0, {})
    assert "the checkpoint is saved without the responses in flight" in caplog.text
    last = read_record(tmp_path).last
    assert (last.state.global_steps, last.state.drawn_batches, last.in_flight) == (2, 2, ())
    resumed, lines = fitted(config_of(tmp_path, ADAPTIVE, 4, resume=True), val_dataset=None)
    assert resumed.global_steps == 4
    assert [line["training/staleness_max"] for line in lines] == [0.0, 1.0]


def test_problems_that_were_not_drawn_cannot_be_in_flight_in_a_checkpoint(tmp_path: Path) -> None:
    trainer, _ = started(config_of(tmp_path, ADAPTIVE, 5))
    first = trainer.train_batches[0]
    trainer.train_step(trainer.draw())
    trainer.train_step(first)
    with pytest.raises(DataError):
        trainer.save_checkpoint()
