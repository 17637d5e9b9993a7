"""A slow rank and slow links are found in the trace of real workers, and the parts of their passes are in it."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mcontroller.testing import simulated_worker_group
from mcontroller.trace.reading import RunTrace, read_trace
from mcontroller.trace.recorder import recording, span
from mcontroller.trace.summary import slow_links, stragglers
from parallel_state.layout import ParallelLayout
from parallel_state.simulated.calls import Call
from parallel_state.simulated.simulation import Simulation
from tests.workers.roles import MODEL, OPTIM, PROMPT, RESPONSE, experience
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, load_config
from workers.train.batches import TokenBatch

pytestmark = pytest.mark.simulated

BACKWARD_S, SLOWER, STEPS = 0.05, 0.12, 8


class Slow(ActorRolloutRefWorker):
    """Sleeps in every backward pass, and longer on one rank."""

    seconds, slower = BACKWARD_S, SLOWER

    def forward_step(self, model: nn.Module, rows: TokenBatch) -> Tensor:
        output = super().forward_step(model, rows)
        info = self.get_megatron_rank_info()
        planted = (info.tp_rank, info.pp_rank, info.dp_rank) == (1, 0, 1)
        if torch.is_grad_enabled():
            output.register_hook(lambda gradient: time.sleep(self.seconds * (1 + self.slower * planted)))
        return output


SETTINGS = {
    **{"model": MODEL, "parallel": {"tp": 2, "pp": 2}, "optim": OPTIM, "ppo_mini_batch_size": 4},
    **{"ppo_micro_batch_size": 1, "rollout": {"prompt_length": PROMPT, "response_length": RESPONSE}},
}


def trace_of_steps(directory: Path, worker_cls: type[ActorRolloutRefWorker]) -> RunTrace:
    """Run steps on TP2 x PP2 x DP2, and return their trace."""
    config = load_config(ActorConfig, SETTINGS)
    with (
        recording(directory),
        simulated_worker_group(worker_cls, ParallelLayout(8, tp=2, pp=2), config, name="actor") as group,
    ):
        group.init_model()
        for step in range(STEPS):
            with span("step", step + 1):
                group.update_actor(experience(4))
    return read_trace(directory)


def test_a_rank_that_sleeps_longer_in_backward_is_named_and_nothing_else(tmp_path: Path) -> None:
    trace = trace_of_steps(tmp_path, Slow)
    assert len(trace.ranks) == 8
    for lane in trace.ranks:  # 2 micro-batches in a step
        counts = Counter(event.name for event in lane.events)
        assert (counts["forward"], counts["backward"], counts["optimizer"]) == (2 * STEPS, 2 * STEPS, STEPS)
    [found] = stragglers(trace)
    assert found.rank == "rank 3 (tp=1 dp=1 pp=0)"
    assert found.work == "backward of actor.update_actor"
    assert found.slower == pytest.approx(SLOWER, abs=0.06) and found.calls == STEPS
    assert slow_links(trace) == []


@pytest.mark.parametrize(
    ("ranks", "seconds"), [((2, 3), 0.006), ((3, 7), 0.02)], ids=["tp", "pp"]
)
def test_a_link_that_is_slow_is_named_and_nothing_else(
    ranks: tuple[int, int], seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = Simulation.wait

    def wait_longer(simulation: Simulation, call: Call) -> None:
        wait(simulation, call)
        if call.group.ranks == ranks:
            time.sleep(seconds)

    monkeypatch.setattr(Simulation, "wait", wait_longer)
    monkeypatch.setattr(Slow, "slower", 0.0)
    trace = trace_of_steps(tmp_path, Slow)
    labels = {2: "rank 2 (tp=0 dp=1 pp=0)", 7: "rank 7 (tp=1 dp=1 pp=1)"}
    [found] = slow_links(trace)
    assert set(found.ranks) == {labels.get(rank, "rank 3 (tp=1 dp=1 pp=0)") for rank in ranks}
    assert (found.work, found.calls, found.often) == ("actor.update_actor", STEPS, 1.0)
    assert stragglers(trace) == []
