"""What roles need together on a GPU, from outcomes with chosen numbers."""

from __future__ import annotations

import pytest

from parallel_state.dry_run.outcome import CONTEXT, Outcome, Use
from parallel_state.layout import ParallelLayout
from trainer.run.shared_gpus import GENERATION, shared_gpus

IDLE = {"actor_rollout_ref": 100, "critic": 40}


def outcome(key: str, peaks: list[int], unneeded: int = 0) -> Outcome:
    """Return the outcome of a call on a stage for each peak."""
    idle = {"parameters": IDLE[key]}
    uses = {rank: Use(1, idle, peak, idle, "", "", 0, {}, unneeded) for rank, peak in enumerate(peaks)}
    return Outcome("", ParallelLayout(2, pp=len(peaks)), uses)


OUTCOMES = {
    "actor_rollout_ref.update_actor": outcome("actor_rollout_ref", [150, 190]),
    "actor_rollout_ref.compute_log_prob": outcome("actor_rollout_ref", [130, 120], unneeded=80),
    "critic.update_critic": outcome("critic", [90]),
}


def test_roles_of_a_gpu_hand_over_their_memory_or_keep_it() -> None:
    shared = shared_gpus(OUTCOMES)
    contexts = 2 * CONTEXT
    assert {phase: size - contexts for (_, phase), size in shared.handed_over.items()} == {
        GENERATION: 0,
        "actor_rollout_ref.update_actor": 190,
        "actor_rollout_ref.compute_log_prob": 50,
        "critic.update_critic": 90,
    }
    assert {phase: size - contexts for (_, phase), size in shared.kept.items()} == {
        GENERATION: 140,
        "actor_rollout_ref.update_actor": 230,
        "actor_rollout_ref.compute_log_prob": 170,
        "critic.update_critic": 190,
    }
    assert (shared.peak("auto"), shared.peak("never")) == (190 + contexts, 230 + contexts)


@pytest.mark.parametrize(("offload", "scored"), [("auto", 130), ("always", 50)])
def test_a_role_that_is_alone_on_its_gpus_hands_over_nothing_unless_told(offload: str, scored: int) -> None:
    shared = shared_gpus(OUTCOMES, offload, {"critic": "critic"})
    ((pool, _), *_) = [key for key in shared.kept if key[1].startswith("actor")]
    assert shared.handed_over[pool, "actor_rollout_ref.compute_log_prob"] == scored + CONTEXT
    assert shared.kept[pool, "actor_rollout_ref.compute_log_prob"] == 130 + CONTEXT
