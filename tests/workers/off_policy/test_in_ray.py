"""One step off policy on Ray, with a pool for the actor and one for the rollout."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from mcontroller import MegatronRayWorkerGroup
from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from tests.workers.off_policy.runs import Lines, trainer_of
from tests.workers.roles import OPTIM
from tests.workers.weights.transfer.roles import Policy
from trainer import Role

WAIT_S = 120.0


class Meeting(Policy):
    """A policy whose update ``k`` and generation ``k + 1`` begin, and then wait for each other."""

    directory: Path | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def meet_in(self, directory: str) -> None:
        self.directory = Path(directory)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO, padding="none", changes_rows=True)
    def generate_sequences(self, prompts: DataProto) -> DataProto | None:
        sampled = self.state.counters["sampled_batches"]
        if sampled:
            self.meet(f"generation {sampled}", f"update {sampled - 1}")
        return super().generate_sequences(prompts)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO, padding="zero_loss")
    def update_actor(self, data: DataProto) -> DataProto:
        updates = self.state.counters["updates"]
        self.meet(f"update {updates}", f"generation {updates + 1}")
        return super().update_actor(data)

    def meet(self, mine: str, other: str) -> None:
        if self.directory is None:
            return
        (self.directory / mine).touch()
        deadline = time.monotonic() + WAIT_S
        while not (self.directory / other).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{mine} began, and {other} did not begin within {WAIT_S:.0f} s")
            threading.Event().wait(0.01)


def run(directory: Path, steps: int, meet: Path) -> dict[int, Any]:
    """Return the metrics of a run by step."""
    lines = Lines()
    settings = {"save_freq": 0, "default_local_dir": str(directory)}
    roles = {Role.Actor: Meeting, Role.Rollout: Meeting}
    with trainer_of(
        MegatronRayWorkerGroup, 1, steps, {"tp": 2}, roles=roles, optim=OPTIM, bundles=2, trackers=[lines], **settings
    ) as made:
        made.init_workers()
        meet.mkdir()
        made.actor.meet_in(str(meet))
        made.rollout.meet_in(str(meet))
        made.fit()
    return lines.steps


def test_generation_and_training_overlap(ray_cluster: None, tmp_path: Path) -> None:
    of_whole = run(tmp_path / "whole", 3, tmp_path / "meetings")
    assert sorted(path.name for path in (tmp_path / "meetings").iterdir()) == [
        *(f"generation {number}" for number in (1, 2, 3)),
        *(f"update {number}" for number in (0, 1, 2)),
    ]
    assert [of_whole[step]["training/staleness_mean"] for step in (1, 2, 3)] == [0.0, 1.0, 1.0]
