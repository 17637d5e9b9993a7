"""A run goes on after a failure at any call, and ends with the weights and metrics of an undisturbed one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mcontroller.errors import CallTimeout, GroupBroken, GroupError, MControllerError, WorkerDied, WorkerError
from mcontroller.local import LocalExecutor
from mcontroller.testing import simulated_worker_group
from tests.trainer.separate import SEPARATE
from tests.trainer.sliced import SLICED, alphabet, sliced_config
from tests.trainer.test_asynchronous_turns import EPISODE
from tests.trainer.toy import ToyActor, demonstrations, problems, toy_config, toy_trainer
from trainer import (
    AlgorithmConfig,
    Callback,
    Display,
    ImportanceConfig,
    PPOConfig,
    RayPPOTrainer,
    Role,
    WarmUpConfig,
)
from trainer.rollout.episodes import Episodes
from trainer.saving.recovery import FAILURES, Recovery, root_error

STEPS = 3
VARYING = ("timing_s", "perf", "memory", "train/restarts", "asynchronous/trainer_w", "asynchronous/rollout_w")
VARYING += ("asynchronous/queue_complete",)  # nothing is generated while a run takes what it recorded


class Recorder:
    """A tracker in memory, which a recovered run rewinds."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log(self, metrics: Mapping[str, float], step: int, phase: str) -> None:
        kept = {name: value for name, value in metrics.items() if not name.startswith(VARYING)}
        self.lines.append((step, kept))

    def log_samples(self, samples: Any, step: int) -> None:
        pass

    def rewind(self, step: int) -> None:
        while self.lines and self.lines[-1][0] > step:
            self.lines.pop()

    def close(self) -> None:
        pass


class Shown(Display):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def starting(self, what: str) -> None:
        self.texts.append(what)


class Events(Callback):
    def __init__(self) -> None:
        self.shown = Shown()
        self.started_times = 0
        self.restarts: list[tuple[int, str]] = []

    def started(self, trainer: Any) -> None:
        self.started_times += 1

    def restarted(self, trainer: Any, failure: Any) -> None:
        self.restarts.append((trainer.global_steps, failure.kind))


class Calls:
    """Counts the calls of all groups, and lets some of them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.failing, submit = 0, frozenset[int](), LocalExecutor.submit

        def counted(executor: LocalExecutor, method: str, *args: Any, **options: Any) -> Any:
            executor.check_alive(method)
            self.count += 1
            if self.count in self.failing:
                text = f"{executor.role} rank 0 died in {method}: killed by SIGKILL"
                fields = {"role": executor.role, "rank": 0, "method": method}
                return executor.fail(WorkerDied(text, **fields, exit_cause="killed by SIGKILL", log_tail=""))
            return submit(executor, method, *args, **options)

        monkeypatch.setattr(LocalExecutor, "submit", counted)

    def fail_at(self, *numbers: int) -> None:
        self.count, self.failing = 0, frozenset(numbers)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def one_group(directory: Path, **trainer: Any) -> tuple[PPOConfig, dict[Role, Any] | None]:
    config = toy_config(STEPS, default_local_dir=str(directory), test_freq=2, **trainer)
    return dataclasses.replace(config, warm_up=WarmUpConfig(steps=2, batch_size=4)), None


def two_groups(directory: Path, **trainer: Any) -> tuple[PPOConfig, dict[Role, Any] | None]:
    rule = AlgorithmConfig(importance=ImportanceConfig(level="token"))
    config = toy_config(STEPS, default_local_dir=str(directory), max_staleness=1, **trainer)
    return dataclasses.replace(config, rollout=0.5, ref=0.5, algorithm=rule), SEPARATE


def by_trajectory(directory: Path, **trainer: Any) -> tuple[PPOConfig, dict[Role, Any] | None]:
    return sliced_config(STEPS, directory, 2, trainer), SLICED


def by_episode(directory: Path, **trainer: Any) -> tuple[PPOConfig, dict[Role, Any] | None, dict[str, Any]]:
    return *by_trajectory(directory, **trainer), {"rollout_fn": Episodes(EPISODE, processes=0)}


def tables(trainer: RayPPOTrainer) -> dict[str, torch.Tensor]:
    groups = trainer.groups.items()
    return {name: group.workers[0].table.clone() for name, group in groups if name in ("actor", "critic")}  # type: ignore[attr-defined]


def run(made: Any, events: Callback | None = None, **parts: Any) -> tuple[dict[str, torch.Tensor], list[Any]]:
    config, roles, *more = made
    recorder = Recorder()
    callbacks = [] if events is None else [events]
    others = parts | ({"display": events.shown} if isinstance(events, Events) else {})
    others |= {"warm_up_dataset": demonstrations(8)} if config.warm_up.steps else {}
    if roles is SLICED:
        others |= {"reward_fn": alphabet, "train_dataset": problems(48), "val_dataset": None}
    others |= more[0] if more else {}
    with toy_trainer(config, roles, trackers=[recorder], callbacks=callbacks, **others) as trainer:
        trainer.init_workers()
        trainer.fit()
        return tables(trainer), recorder.lines


@pytest.mark.parametrize(
    ("make", "save_freq", "memory"),
    [
        *((one_group, *saving) for saving in [(-1, 0), (2, 0), (-1, 1)]),
        (two_groups, 2, 1),
        (by_trajectory, 2, 0),
        (by_episode, 2, 1),
    ],
)
def test_a_failure_at_any_call_changes_neither_weights_nor_metrics(
    make: Any, save_freq: int, memory: int, calls: Calls, tmp_path: Path
) -> None:
    saving = {"save_freq": save_freq, "memory_save_freq": memory}
    weights, metrics = run(make(tmp_path / "undisturbed", **saving))
    roles = make(tmp_path)[1] or (1, 2)
    is_exact = roles is not SLICED  # by trajectory, up to what was recorded before the failure: the rest is made again
    starts = len(roles) + (roles is SLICED)  # outside of fit: init_model of each group, and generation_limits
    total = calls.count
    assert total > 30
    for number in range(starts + 1, total + 1, 1 if make is one_group and save_freq == 2 else 3):
        calls.fail_at(number)
        events, directory = Events(), tmp_path / str(number)
        actual, lines = run(make(directory, **saving), events)
        assert len(events.restarts) == events.started_times == 1, number
        assert not is_exact or all(torch.equal(actual[name], weights[name]) for name in weights), number
        [failure] = map(json.loads, (directory / FAILURES).read_text().splitlines())
        step, repeated = failure["step"], failure["step"] - 1 - events.restarts[0][0]
        assert [number for number, _ in lines] == [number for number, _ in metrics]
        assert all(
            line == expected for line, expected in zip(lines, metrics, strict=True) if is_exact or line[0] < step
        )
        went_on = f"going on from step {step - 1 - repeated} after WorkerDied in step {step}"
        assert f"{went_on}; completed steps to repeat: {repeated}" in events.shown.texts
        assert failure["kind"] == "WorkerDied" and failure["restarted"] and failure["details"]["rank"] == 0
        if memory == 1:  # at most the running step is lost, with its validation and its saves
            assert repeated == 0 or (repeated == 1 and failure["details"]["method"] != "update_actor"), failure


def test_a_failure_at_calls_on_simulated_ranks_changes_nothing(calls: Calls, tmp_path: Path) -> None:
    def start(pool: Any, init: Any, name_prefix: str) -> Any:
        return simulated_worker_group(init, 2, name=name_prefix)

    weights, metrics = run(one_group(tmp_path, memory_save_freq=1, save_freq=-1), ray_worker_group_cls=start)
    total = calls.count
    for number in range(3, total + 1, 8):
        calls.fail_at(number)
        made = one_group(tmp_path / str(number), memory_save_freq=1, save_freq=-1)
        actual, lines = run(made, ray_worker_group_cls=start)
        assert all(torch.equal(actual[name], weights[name]) for name in weights), number
        assert lines == metrics, number


def test_a_failure_within_the_recovery_from_another_is_recovered_from(calls: Calls, tmp_path: Path) -> None:
    weights, metrics = run(one_group(tmp_path / "undisturbed", save_freq=2))
    middle = calls.count // 2
    for second in (1, 2, 3, 5):
        calls.fail_at(middle, middle + second)
        actual, lines = run(one_group(tmp_path / str(second), save_freq=2))
        assert len((tmp_path / str(second) / FAILURES).read_text().splitlines()) == 2
        assert all(torch.equal(actual[name], weights[name]) for name in weights)
        assert lines == metrics


class Broken(ToyActor):
    def update_actor(self, data: Any) -> Any:
        raise ValueError("a fault of its own")

    update_actor.__dict__.update(ToyActor.update_actor.__dict__)


def test_an_exception_of_a_worker_ends_the_run_unless_its_type_is_listed(tmp_path: Path) -> None:
    roles = {Role.ActorRolloutRef: Broken, Role.Critic: toy_trainer(toy_config(1)).role_worker_mapping[Role.Critic]}
    with pytest.raises(WorkerError) as caught:
        run((toy_config(STEPS, default_local_dir=str(tmp_path)), roles))
    assert (caught.value.role, caught.value.rank, caught.value.coordinates) == ("actor", 0, {})
    assert "ValueError is an exception of the worker's own code" in caught.value.__notes__[0]
    listed = toy_config(STEPS, default_local_dir=str(tmp_path), restart_on=("ValueError",), max_restarts=9)
    with pytest.raises(WorkerError) as caught:
        run((listed, roles))
    assert caught.value.__notes__ == ["The run was not restarted: step 1 has failed 3 times with the same cause."]
    reasons = [json.loads(line)["reason"] for line in (tmp_path / FAILURES).read_text().splitlines()]
    assert [reason is None for reason in reasons] == [False, True, True, False]


@pytest.mark.parametrize(("cause", "goes_on"), [("EngineDied: signal 9", True), ("ValueError: 9", False)])
def test_the_end_of_an_engine_is_the_failure_of_a_process(cause: str, goes_on: bool, tmp_path: Path) -> None:
    fields = {"rank": 0, "coordinates": {}, "node": "", "pid": 1, "worker_traceback": "", "followers": 0}
    error = WorkerError("failed", role="rollout", method="generate_sequences", cause=cause, **fields)
    recovery = Recovery(toy_config(1, default_local_dir=str(tmp_path)).trainer)
    assert recovery.is_admitted(error, 1) == goes_on


def died(rank: int) -> WorkerDied:
    return WorkerDied("died", role="actor", rank=rank, method="update", exit_cause="", log_tail="")


def test_restarts_are_counted_for_each_cause_and_hour(tmp_path: Path) -> None:
    clock = iter([0.0, 10.0, 20.0, 30.0, 40.0, 3605.0])
    config = toy_config(1, default_local_dir=str(tmp_path), max_restarts=2).trainer
    recovery = Recovery(config, lambda: next(clock))
    admitted = [recovery.admit(died(rank), step) for step, rank in enumerate([0, 0, 1, 0])]
    assert [admission is not None for admission in admitted] == [True, True, True, False]
    late = CallTimeout("late", role="actor", method="update", timeout=1.0, ranks=(0,), stacks={}, cause="", report="")
    assert recovery.admit(GroupBroken("broken", role="actor", first_cause=late), 4) is not None
    assert recovery.admit(died(0), 5) is not None  # the first was more than an hour ago


def test_the_cause_of_an_error_is_the_first_failure_of_a_group() -> None:
    first = died(0)
    after = GroupBroken("broken", role="actor", first_cause=first)
    transfer = MControllerError("weights did not arrive")
    transfer.__cause__ = after
    assert root_error(transfer) is root_error(after) is root_error(first) is first
    lost = GroupError("lost")
    first.__cause__ = OSError()
    lost.__cause__ = first  # an error of a group is the failure itself
    assert root_error(lost) is lost


def test_other_errors_of_a_group_end_the_run(tmp_path: Path) -> None:
    error = GroupError("the call was cancelled")
    assert Recovery(toy_config(1, default_local_dir=str(tmp_path)).trainer).admit(error, 1) is None
    assert error.__notes__ == ["The run was not restarted: GroupError is not the failure of a process."]
