"""Runs in which the rollout computes in bfloat16 and training in float32, with and without the rollout's experts."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from mcontroller.ray import Role
from mcontroller.testing import simulated_worker_group
from tests.workers.off_policy.runs import Lines, trainer_of
from tests.workers.router_replay.setup import MIXTURE
from workers.actor import ActorRolloutRefWorker

STEPS = 2
TOGETHER = {Role.ActorRollout: ActorRolloutRefWorker}


def groups(pool: Any, init: Any, name_prefix: str) -> Any:
    return simulated_worker_group(init, 1 if name_prefix == "rollout" else 2, name=name_prefix)


@functools.cache
def metrics(mode: str, staleness: int = 0, together: bool = False) -> dict[int, dict[str, float]]:
    """Return the metrics of the steps of a run."""
    lines = Lines()
    settings = {"model": MIXTURE | ({"dtype": "bfloat16"} if together else {}), "router_replay": mode}
    of_rollout = {"model": {"dtype": "bfloat16"}, "router_replay": mode if mode == "rollout" else "none"}
    options = {"optim": {"lr": 1e-3}, "trackers": [lines], "settings": settings, "of_rollout": of_rollout}
    roles = TOGETHER if together else None
    with trainer_of(groups, staleness, STEPS, {"pp": 2}, roles=roles, **options) as trainer:
        trainer.init_workers()
        trainer.fit()
    return lines.steps


def test_experts_of_the_rollout_reduce_the_mismatch() -> None:
    plain, replayed = metrics("none"), metrics("rollout")
    for step in range(1, STEPS + 1):
        for name, share in (("mean", 0.9), ("max", 0.3)):
            key = f"training/rollout_probs_diff_{name}"
            assert 0 < replayed[step][key] < share * plain[step][key]


@pytest.mark.parametrize(("staleness", "together", "step"), [(1, False, 1), (0, True, 2)])
def test_replay_runs_one_step_off_policy_and_with_actor_and_rollout_together(
    staleness: int, together: bool, step: int
) -> None:
    found, plain = metrics("rollout", staleness, together), metrics("none", staleness, together)
    assert found[2]["actor/optimizer_steps"] == 1.0
    assert found[step]["training/rollout_probs_diff_max"] < 0.3 * plain[step]["training/rollout_probs_diff_max"]


def test_experts_of_the_old_log_probs_leave_those_of_the_rollout() -> None:
    found = metrics("old_log_probs")
    assert found[1]["training/rollout_probs_diff_mean"] == metrics("none")[1]["training/rollout_probs_diff_mean"]
    assert found[1]["actor/ratio_max"] == pytest.approx(1.0, abs=1e-4)  # one step, at the weights of the recording
