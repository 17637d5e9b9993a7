"""A run that is killed at any time of a save goes on from a complete checkpoint."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.separate import SEPARATE
from tests.trainer.toy import toy_config, toy_trainer

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.truncate"}
STEPS = 3


def started(directory: Path, steps: int, staleness: int, **trainer: Any) -> Any:
    """A trainer whose groups have started: actor and rollout in one group, or one step off policy in two."""
    config = toy_config(steps, default_local_dir=str(directory), max_staleness=staleness, **trainer)
    if staleness:
        config = dataclasses.replace(config, rollout=0.5, ref=0.5)
    made = toy_trainer(config, SEPARATE if staleness else None, val_dataset=None)
    made.init_workers()
    return made


def train(directory: Path, staleness: int, **trainer: Any) -> Any:
    made = started(directory, STEPS, staleness, max_to_keep=1, **trainer)
    made.fit()
    return made


def killed_at(change: int, run: Callable[[], object]) -> bool:
    """Run in a forked process that kills itself before a change of the file system; return whether it was killed."""
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        changes = 0

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal changes
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if event in CHANGES or writes:
                changes += 1
                if changes > change:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            run()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@pytest.mark.processes
@pytest.mark.parametrize("staleness", [1])
def test_killed_at_any_change_of_the_files_a_run_goes_on_to_the_same_weights(tmp_path: Path, staleness: int) -> None:
    torch.set_num_threads(1)
    whole = train(tmp_path / "whole", staleness, save_freq=-1)
    with started(tmp_path / "first", 1, staleness, save_freq=0, max_to_keep=1) as first:
        first.fit()
    resumed_at, change = [], 0
    while True:
        directory = tmp_path / str(change)
        shutil.copytree(tmp_path / "first", directory, symlinks=True)
        killed = killed_at(change, lambda: train(directory, staleness, resume=True, save_freq=1))  # noqa: B023
        resumed_at.append(started(directory, 1, staleness, resume=True).load_checkpoint())
        resumed = train(directory, staleness, resume=True, save_freq=1)
        for group in ("actor", "critic"):
            expected, actual = (made.groups[group].workers[0].table for made in (whole, resumed))
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)
            left = sorted(entry.name for entry in (directory / group).iterdir())
            assert left == [f"global_step_{STEPS}", f"iter_{STEPS}", "latest"]
            assert (directory / group / f"iter_{STEPS}").readlink() == Path(f"global_step_{STEPS}")
            assert (directory / group / "latest").read_text() == f"global_step_{STEPS}"
        if staleness:
            assert [entry.name for entry in (directory / "in_flight").iterdir()] == [f"global_step_{STEPS}"]
        if not killed:
            break
        change += 1
    assert resumed_at == sorted(resumed_at) and set(resumed_at) == {1, 2, 3}
    assert change > 25
