"""A second run in the directory of a living one is rejected, with the process of the first, and removes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mcontroller.errors import DataError
from tests.trainer.toy import toy_config, toy_trainer

pytestmark = pytest.mark.processes


def started(directory: Path, steps: int, **trainer: Any) -> Any:
    made = toy_trainer(toy_config(steps, default_local_dir=str(directory), **trainer), val_dataset=None)
    made.init_workers()
    return made


@contextmanager
def saving_run(directory: Path) -> Iterator[int]:
    """Run a forked process that writes its second save as long as the block takes; yield its process id."""
    ready, go_on = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        try:
            with started(directory, 1, save_freq=1) as first:
                first.fit()
                first.global_steps = 2
                first.save_checkpoint(wait=False)
                os.close(ready[1])
                os.close(go_on[1])
                os.read(go_on[0], 1)
                first.checkpoints.finish()
        finally:
            os._exit(0)
    os.close(ready[1])
    os.close(go_on[0])
    os.read(ready[0], 1)
    yield pid
    os.close(go_on[1])
    os.waitpid(pid, 0)


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_is_rejected_and_the_save_of_the_first_stays(tmp_path: Path, resume: bool) -> None:
    torch.set_num_threads(1)
    with saving_run(tmp_path) as pid:
        written = sorted(tmp_path.glob("*/.saving-*/global_step_*/state.npz"))
        assert len(written) == 2
        with pytest.raises(DataError) as caught:
            started(tmp_path, 2, save_freq=1, resume=resume).fit()
        assert (caught.value.path, caught.value.pid) == (str(tmp_path / "run.lock"), pid)
        assert sorted(tmp_path.glob("*/.saving-*/global_step_*/state.npz")) == written
    with started(tmp_path, 3, save_freq=1, resume=True) as resumed:
        assert resumed.load_checkpoint() == 2
    assert not list(tmp_path.rglob("*.lock"))
