"""A save that finds the disk full: one error with the disk and what the run has, no remains, and the run goes on."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import DataError
from tests.trainer.toy import ToyActor, ToyCritic, toy_config, toy_trainer
from trainer import Role
from trainer.trackers import Run, make_trackers

FULL = os.strerror(errno.ENOSPC)


def started(directory: Path, roles: Any = None, steps: int = 2, **trainer: Any) -> Any:
    config = toy_config(steps, default_local_dir=str(directory), **trainer)
    made = toy_trainer(config, roles, val_dataset=None)
    made.init_workers()
    return made


def saving(directory: Path) -> list[Path]:
    return [*directory.rglob(".saving-*"), *directory.rglob(".*.partial")]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 512 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a disk needs root")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Path) -> None:
    with open(disk / "other", "wb", buffering=0) as file, pytest.raises(OSError) as caught:
        while True:
            file.write(bytes(4096))
    assert caught.value.errno == errno.ENOSPC


class Plain(ToyActor):
    """Writes a plain file first: the error of an archive on a full disk depends on the version of numpy."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, global_step: int, max_to_keep: int | None = None, **options: bool) -> str:
        (Path(path) / "plain").mkdir(parents=True)
        (Path(path) / "plain" / "file").write_bytes(bytes(8192))
        return super().save_checkpoint(path, global_step, max_to_keep)


@pytest.mark.processes
@pytest.mark.parametrize("moment", ["the groups write", "the record is written"])
def test_a_save_on_a_full_disk_names_it_and_leaves_nothing(disk: Path, moment: str) -> None:
    directory = disk / "checkpoints"
    roles = {Role.ActorRolloutRef: Plain, Role.Critic: ToyCritic}
    with started(directory, roles, save_freq=1) as run:
        run.train_step(run.draw())
        run.global_steps = 1
        run.save_checkpoint()
        run.global_steps = 2
        if moment == "the record is written":
            run.save_checkpoint(wait=False)
        fill(disk)
        with pytest.raises(DataError) as caught:
            run.checkpoints.finish() if moment == "the record is written" else run.save_checkpoint()
        assert caught.value.path == str(directory) and FULL in str(caught.value) and saving(directory) == []
        if moment == "the record is written":
            assert f"{disk} has 0 bytes" in str(caught.value)
    (disk / "other").unlink()
    with started(directory, roles, save_freq=1, resume=True) as resumed:
        resumed.fit()
        assert resumed.checkpoints.saved_step == 2


@pytest.mark.processes
def test_metrics_that_find_the_disk_full_are_an_error_with_their_file(disk: Path) -> None:
    [tracker] = make_trackers(["jsonl"], Run(disk))
    tracker.log({"train/score": 0.5}, 1)
    fill(disk)
    with pytest.raises(DataError) as caught:
        for step in range(2, 1000):
            tracker.log({"train/score": 0.5}, step)
    tracker.close()
    assert caught.value.path == str(disk / "metrics.jsonl") and f"{disk} has 0 bytes" in str(caught.value)
    assert json.loads((disk / "metrics.jsonl").read_text().splitlines()[0])["global_step"] == 1


@pytest.mark.processes
def test_a_batch_that_finds_the_disk_full_is_an_error_of_the_system(disk: Path) -> None:
    fill(disk)
    with pytest.raises(OSError) as caught:
        DataProto.from_dict({"responses": torch.zeros(64, 64)}).save_to_disk(disk / "batch")
    assert f"{disk}/batch" in str(caught.value) and FULL in str(caught.value)
    assert [entry.name for entry in disk.iterdir()] == ["other"]


class Background(ToyActor):
    """Writes in the background, and finds that the disk is full when it finishes."""

    unfinished = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, global_step: int, *, asynchronous: bool = False, **options: bool) -> str:
        self.unfinished = asynchronous
        (Path(path) / f".global_step_{global_step}.partial").mkdir(parents=True)
        return str(Path(path) / f"global_step_{global_step}")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_for_checkpoint(self) -> None:
        self.before_shutdown()

    def before_shutdown(self) -> None:
        unfinished, self.unfinished = self.unfinished, False
        if unfinished:
            raise OSError(errno.ENOSPC, FULL, "shard")


def test_a_run_that_ends_during_a_failing_save_reports_the_save(tmp_path: Path) -> None:
    roles = {Role.ActorRolloutRef: Background, Role.Critic: ToyCritic}
    with pytest.raises(DataError) as caught, started(tmp_path, roles) as run:
        run.save_checkpoint(wait=False)
        raise OSError(errno.ENOSPC, FULL, "metrics.jsonl")
    assert FULL in str(caught.value)
    assert saving(tmp_path) == [] and not (tmp_path / "run.lock").exists()
    assert "metrics.jsonl" in str(caught.value.__context__)
