"""A failure of one of several stages of worker processes is raised at once, and the other groups stay usable."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import WorkerError
from mcontroller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from mcontroller.worker import Worker
from trainer.stages import Stages


class Scorer(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def until(self, path: str) -> bool:
        while not Path(path).exists():
            threading.Event().wait(0.01)
        return True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fails(self) -> None:
        raise ValueError("no scores")


def test_the_first_error_is_raised_and_the_group_of_a_running_stage_is_usable(
    ray_cluster: None, tmp_path: Path
) -> None:
    path = tmp_path / "go on"
    pool = RayResourcePool([2], use_gpu=False, name_prefix="overlap")
    stages, init = Stages(), RayClassWithInitArgs(Scorer)
    with (
        pool,
        RayWorkerGroup(pool.sub_pool(0, 1), init, name_prefix="slow") as slow,
        RayWorkerGroup(pool.sub_pool(1, 2), init, name_prefix="failing") as failing,
    ):
        with (
            pytest.raises(WorkerError) as caught,
            stages.overlapping() as start,
        ):
            start("values", slow.until, str(path))
            start("more values", slow.until, str(path))
            start("scores", failing.fails)
        assert (caught.value.role, caught.value.rank, caught.value.coordinates) == ("failing", 0, {})
        path.touch()
        assert slow.until(str(path)) == [True]
    assert set(stages.totals) == {"scores"}
