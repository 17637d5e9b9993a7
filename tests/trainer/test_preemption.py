"""A run that is stopped by a signal or by its time limit saves after its step, and goes on to the same weights."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from mcontroller.data.batch import DataProto
from tests.trainer.toy import CALLS, next_letter, toy_config, toy_trainer
from trainer import Reward
from trainer.saving.preemption import PREEMPTED, Preempted, Preemption

STEPS = 5


def fit(directory: Path, reward: Any = next_letter, **trainer: Any) -> Any:
    config = toy_config(STEPS, default_local_dir=str(directory), **trainer)
    made = toy_trainer(config, val_dataset=None, reward_fn=reward)
    made.init_workers()
    CALLS.clear()
    made.fit()
    return made


def signalled_in(step: int, number: signal.Signals) -> Any:
    """Return a reward function that signals this process while it computes the reward of a step."""
    calls = 0

    def reward(batch: DataProto) -> Reward:
        nonlocal calls
        calls += 1
        if calls == step:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGTERM)  # from the script that has started the run
        return next_letter(batch)

    return reward


@pytest.mark.parametrize("number, save_freq", [(signal.SIGTERM, -1), (signal.SIGINT, 1), (signal.SIGHUP, 1)])
def test_signal_saves_after_the_step_and_the_run_goes_on_to_the_same_weights(
    tmp_path: Path, number: signal.Signals, save_freq: int
) -> None:
    before = signal.getsignal(number)
    whole = fit(tmp_path / "whole", save_freq=-1)
    with pytest.raises(SystemExit) as caught:
        fit(tmp_path / "run", signalled_in(2, number), save_freq=save_freq)
    assert isinstance(caught.value, Preempted) and caught.value.code == PREEMPTED == 75
    assert (caught.value.reason, caught.value.global_steps) == (number.name, 2)
    assert CALLS.count("update_actor") == 2 and signal.getsignal(number) is before
    resumed = fit(tmp_path / "run", resume=True)
    assert CALLS.count("update_actor") == STEPS - 2
    for group in ("actor", "critic"):
        expected, actual = (made.groups[group].workers[0].table for made in (whole, resumed))
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_later_signal_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.saving.preemption.SAME_REQUEST_S", 0.0)

    def reward(batch: DataProto) -> Reward:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal did not interrupt")

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, reward)


def test_run_stops_while_a_step_and_a_save_still_fit_in_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    preemption = Preemption(max_seconds=100.0)
    reasons = []
    for seconds in (10.0, 30.0, 20.0, 5.0):
        reasons.append(preemption.reason(saving=20.0))
        with preemption.timing():
            now += seconds
    assert reasons == [None, None, None, "trainer.max_seconds=100"]
    assert Preemption(max_seconds=0.0).reason(saving=1e9) is None


def test_time_limit_saves_and_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(Preempted) as caught:
        fit(tmp_path, max_seconds=1e-9)
    assert caught.value.global_steps is None and not CALLS
