"""A slow rank is found in the trace of real workers, and the parts of their passes are in it.

The clock goes on by what a rank is planned to take, and by little else: the load of this machine has no part.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mcontroller.testing import simulated_worker_group
from mcontroller.trace import recorder
from mcontroller.trace.reading import RunTrace, read_trace
from mcontroller.trace.recorder import recording, span
from mcontroller.trace.summary import stragglers
from parallel_state.layout import ParallelLayout
from tests.workers.roles import MODEL, OPTIM, PROMPT, RESPONSE, experience
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, load_config
from workers.train.batches import TokenBatch

pytestmark = pytest.mark.simulated

BACKWARD_S, SLOWER, STEPS, ROWS = 0.05, 0.12, 8, 4
SETTINGS = {
    **{"model": MODEL, "parallel": {"tp": 2, "pp": 2}, "optim": OPTIM | {"distributed_optimizer": False}},
    **{"ppo_mini_batch_size": ROWS, "ppo_micro_batch_size": 1},
    "rollout": {"prompt_length": PROMPT, "response_length": RESPONSE},
}


class Clock:
    """Nanoseconds: 10 us for every look at it, and what is slept."""

    def __init__(self) -> None:
        self._now = 0

    def __call__(self) -> int:
        self._now += 10_000
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += int(seconds * 1e9)


class Slow(ActorRolloutRefWorker):
    """Sleeps in every backward pass, and longer on one rank."""

    sleep: Callable[[float], None]

    def forward_step(self, model: nn.Module, rows: TokenBatch) -> Tensor:
        output = super().forward_step(model, rows)
        info = self.get_megatron_rank_info()
        planted = (info.tp_rank, info.pp_rank, info.dp_rank) == (1, 0, 1)
        if torch.is_grad_enabled():
            output.register_hook(lambda gradient: self.sleep(BACKWARD_S * (1 + SLOWER * planted)))
        return output


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(recorder, "now", clock)
    monkeypatch.setattr(time, "monotonic_ns", clock)
    monkeypatch.setattr(Slow, "sleep", staticmethod(clock.sleep), raising=False)
    return clock


def trace_of_steps(directory: Path) -> RunTrace:
    """Run steps on TP2 x PP2 x DP2, and return their trace."""
    config = load_config(ActorConfig, SETTINGS)
    with (
        recording(directory),
        simulated_worker_group(Slow, ParallelLayout(8, tp=2, pp=2), config, name="actor") as group,
    ):
        group.init_model()
        for step in range(STEPS):
            with span("step", step + 1):
                group.update_actor(experience(ROWS))
    return read_trace(directory)


def test_a_rank_that_sleeps_longer_in_backward_is_named_and_nothing_else(tmp_path: Path, clock: Clock) -> None:
    trace = trace_of_steps(tmp_path)
    assert len(trace.ranks) == 8
    for lane in trace.ranks:  # 2 micro-batches in a step
        counts = Counter(event.name for event in lane.events)
        assert (counts["forward"], counts["backward"], counts["optimizer"]) == (2 * STEPS, 2 * STEPS, STEPS)
    [straggler] = stragglers(trace)
    assert straggler.rank == "rank 3 (tp=1 dp=1 pp=0)"
    assert straggler.work == "backward of actor.update_actor"
    assert straggler.slower == pytest.approx(SLOWER, abs=0.01) and straggler.calls == STEPS
