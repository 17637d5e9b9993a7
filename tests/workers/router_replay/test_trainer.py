"""Runs in which the rollout computes in bfloat16 and training in float32, with and without the rollout's experts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import Tensor

from mcontroller.data.batch import DataProto
from mcontroller.testing import simulated_worker_group
from tests.workers.off_policy.runs import Lines, trainer_of
from tests.workers.router_replay.setup import MIXTURE
from trainer import Callback, Role
from workers.actor import ActorRolloutRefWorker

STEPS = 2
TOGETHER = {Role.ActorRollout: ActorRolloutRefWorker}
ROUNDING = 2.0**-5
"""Bound of a log-probability's error: each of 4 layers and the output round to 8 bits, of logits up to about 2."""


class Batches(Callback):
    """Keeps the batches that are trained on."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def batch_ready(self, trainer: Any, batch: DataProto) -> None:
        self.steps.append({name: column.clone() for name, column in batch.tensors().items()})


def groups(pool: Any, init: Any, name_prefix: str) -> Any:
    return simulated_worker_group(init, 1 if name_prefix == "rollout" else 2, name=name_prefix)


@functools.cache
def run(mode: str, staleness: int = 0, together: bool = False) -> tuple[dict[int, dict[str, float]], dict[str, Tensor]]:
    """Return the metrics of the steps of a run, and the batch of the first."""
    lines, batches = Lines(), Batches()
    settings = {"model": MIXTURE | ({"dtype": "bfloat16"} if together else {}), "router_replay": mode}
    of_rollout = {"model": {"dtype": "bfloat16"}, "router_replay": mode if mode == "rollout" else "none"}
    options = {"optim": {"lr": 1e-3}, "trackers": [lines], "settings": settings, "of_rollout": of_rollout}
    roles = TOGETHER if together else None
    with trainer_of(groups, staleness, STEPS, {"pp": 2}, roles=roles, callbacks=[batches], **options) as trainer:
        trainer.init_workers()
        trainer.fit()
    return lines.steps, batches.steps[0]


def mismatch(mode: str, staleness: int, together: bool) -> Tensor:
    """Return ``|log p_rollout - log p_policy|`` of the tokens of the first step, which every run samples alike."""
    batch = run(mode, staleness, together)[1]
    return (batch["rollout_log_probs"] - batch["old_log_probs"])[batch["response_mask"].bool()].abs()


@pytest.mark.parametrize(("staleness", "together"), [(1, False), (0, True)])
def test_experts_of_the_rollout_remove_the_mismatch_of_other_experts(staleness: int, together: bool) -> None:
    plain, replayed = mismatch("none", staleness, together), mismatch("rollout", staleness, together)
    affected = plain != replayed  # tokens for which the policy's routers choose other experts than the rollout's
    assert 0 < int(affected.sum()) < affected.numel()
    assert replayed[affected].mean() < 0.5 * plain[affected].mean()
    assert replayed.max() < ROUNDING
    assert run("rollout", staleness, together)[0][2]["actor/optimizer_steps"] == 1.0


def test_experts_of_the_old_log_probs_leave_those_of_the_rollout() -> None:
    actual = run("old_log_probs")[0]
    assert actual[1]["training/rollout_probs_diff_mean"] == run("none")[0][1]["training/rollout_probs_diff_mean"]
    assert actual[1]["actor/ratio_max"] == pytest.approx(1.0, abs=1e-4)  # one step, at the weights of the recording
