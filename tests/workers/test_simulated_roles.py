"""Actor and critic on simulated ranks: the same as one process, checkpoints included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mcontroller.testing import SimulatedGroupMaker
from parallel_state.layout import ParallelLayout
from parallel_state.simulated import run_ranks
from tests import forking
from tests.process_state import state_of_this_process
from tests.workers import parity
from tests.workers.roles import MODEL, OPTIM, PROMPT, RESPONSE, SAMPLED, experience, prompts
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, load_config

pytestmark = [pytest.mark.processes, pytest.mark.simulated]

BASE = {"model": MODEL, "optim": OPTIM, "ppo_mini_batch_size": 8, "ppo_micro_batch_size": 2, "ppo_epochs": 1}
ROLLOUT = {"prompt_length": PROMPT, "response_length": RESPONSE, "seed": 3}


def test_a_group_samples_and_trains_as_one_process_and_restores_a_checkpoint(
    simulated_group: SimulatedGroupMaker, tmp_path: Path
) -> None:
    def computed(ranks: int, **axes: int) -> tuple[torch.Tensor, ...]:
        config = load_config(ActorConfig, BASE | {"parallel": axes, "rollout": ROLLOUT}, {})
        group: Any = simulated_group(ActorRolloutRefWorker, ParallelLayout(ranks, **axes), config, "actor_rollout_ref")
        group.init_model()
        batch = experience(16)
        sampled = group.generate_sequences(prompts(16, SAMPLED)).batch["responses"]
        group.update_actor(batch)
        group.save_checkpoint(str(tmp_path / str(ranks)), 1)
        trained = group.compute_log_prob(batch).batch["old_log_probs"]
        group.update_actor(batch)
        group.load_checkpoint(str(tmp_path / str(ranks)))
        restored = group.compute_log_prob(batch).batch["old_log_probs"]
        assert torch.equal(trained, restored)
        return sampled, trained

    before = state_of_this_process()
    (sampled, trained), (expected, expected_trained) = computed(8, tp=2, pp=2), computed(1)
    assert state_of_this_process() == before
    assert torch.equal(sampled, expected)
    torch.testing.assert_close(trained, expected_trained, rtol=0, atol=1e-5)


@pytest.mark.skipif(
    torch.version.cuda is not None,
    reason="with this torch, a process in which simulated ranks have computed gradients cannot fork ranks that do",
)
def test_a_layout_has_the_bits_of_forked_gloo_ranks() -> None:
    layout = parity.LAYOUTS["PP2 x DP2, distributed optimizer with overlap"]
    simulated = run_ranks(layout.ranks, parity.computed, layout, "float32")
    forked = forking.run_ranks(parity.computed, layout.ranks, layout, "float32")
    for rank in (*simulated, *forked):
        assert rank.pop("backend") == "gloo"
    torch.testing.assert_close(simulated, forked, rtol=0, atol=0)
