"""A rank that is slow in backward is found in the trace of real workers, and the parts of their passes are in it."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mcontroller.testing import simulated_worker_group
from mcontroller.trace.reading import read_trace
from mcontroller.trace.recorder import recording, span
from mcontroller.trace.summary import stragglers
from parallel_state.layout import ParallelLayout
from tests.workers.roles import MODEL, OPTIM, PROMPT, RESPONSE, experience
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, load_config
from workers.train.batches import TokenBatch

pytestmark = pytest.mark.simulated

BACKWARD_S, SLOWER, STEPS = 0.05, 0.12, 8


class Slow(ActorRolloutRefWorker):
    """Sleeps in every backward pass, and longer on one rank."""

    seconds = BACKWARD_S

    def forward_step(self, model: nn.Module, rows: TokenBatch) -> Tensor:
        output = super().forward_step(model, rows)
        info = self.get_megatron_rank_info()
        planted = (info.tp_rank, info.pp_rank, info.dp_rank) == (1, 0, 1)
        if torch.is_grad_enabled():
            output.register_hook(lambda gradient: time.sleep(self.seconds * (1 + SLOWER * planted)))
        return output


def test_a_rank_that_sleeps_longer_in_backward_is_named_and_nothing_else(tmp_path: Path) -> None:
    settings = {
        **{"model": MODEL, "parallel": {"tp": 2, "pp": 2}, "optim": OPTIM, "ppo_mini_batch_size": 4},
        **{"ppo_micro_batch_size": 1, "rollout": {"prompt_length": PROMPT, "response_length": RESPONSE}},
    }
    config = load_config(ActorConfig, settings)
    with (
        recording(tmp_path),
        simulated_worker_group(Slow, ParallelLayout(8, tp=2, pp=2), config, name="actor") as group,
    ):
        group.init_model()
        for step in range(STEPS):
            with span("step", step + 1):
                group.update_actor(experience(4))
    trace = read_trace(tmp_path)
    assert len(trace.ranks) == 8
    for lane in trace.ranks:  # 2 micro-batches in a step
        counts = Counter(event.name for event in lane.events)
        assert (counts["forward"], counts["backward"], counts["optimizer"]) == (2 * STEPS, 2 * STEPS, STEPS)
    [found] = stragglers(trace)
    assert found.rank == "rank 3 (tp=1 dp=1 pp=0)"
    assert found.work == "backward of actor.update_actor"
    assert found.slower == pytest.approx(SLOWER, abs=0.06) and found.calls == STEPS
