"""Dry runs of roles: the peak that an H100 had, and the calls of each role."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from parallel_state.dry_run.run import dry_run_of
from parallel_state.layout import ParallelLayout
from workers import ActorRolloutRefWorker, CriticWorker
from workers.config import CriticConfig, LoraConfig
from workers.dry_run import RoleCall
from workers.gpucheck.policy import FULL, TINY_MODEL, actor_config, role_config
from workers.verify.roles import variant_of

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU"),
]
GIB = 2**30
SMALL = {"model": TINY_MODEL | {"dtype": "bfloat16"}, "ppo_mini_batch_size": 8, "ppo_micro_batch_size": 2}


def test_an_update_of_a_large_model_has_the_peak_of_a_gpu() -> None:
    """53.0 GB (2**30 bytes) on one H100, with local layers; see docs/gpu.md."""
    model = FULL.model | {"dtype": "bfloat16", "transformer_impl": "local"}
    rollout = {"prompt_length": FULL.prompt, "response_length": FULL.response}
    sizes = {"ppo_micro_batch_size": 1, "ppo_mini_batch_size": 2, "model": model, "rollout": rollout}
    config, layout = actor_config(sizes), ParallelLayout(1)
    call = RoleCall(ActorRolloutRefWorker, config, "actor", "update_actor", layout, FULL.prompt, FULL.response)
    outcome = dry_run_of(call, variant_of(config, layout))
    assert outcome.peak / GIB == pytest.approx(53.0, rel=0.01)
    (use,) = outcome.uses.values()
    assert use.by_kind["optimizer"] == pytest.approx(12 * use.parameters, rel=0.01)
    assert use.by_kind["gradients"] == pytest.approx(4 * use.parameters, rel=0.01)


@pytest.mark.parametrize("changed", [{}, {"packed": True}, {"model": {"lora": LoraConfig(rank=4)}}])
def test_a_role_is_updated_and_scored_without_data(changed: dict[str, Any]) -> None:
    rollout = {"prompt_length": 24, "response_length": 40}
    changed = changed | {"model": SMALL["model"] | changed.get("model", {})}
    config = actor_config({**SMALL, **changed, "rollout": rollout, "parallel": {"tp": 2, "pp": 2}})
    layout = ParallelLayout(4, tp=2, pp=2)
    peaks = {}
    for method in ("update_actor", "compute_log_prob"):
        call = RoleCall(ActorRolloutRefWorker, config, "actor", method, layout, 24, 40)
        outcome = dry_run_of(call, variant_of(config, layout), second=False)
        assert not outcome.failure
        peaks[method] = outcome.peak
    assert peaks["update_actor"] > peaks["compute_log_prob"] > 0


def test_a_critic_in_data_parallel_ranks() -> None:
    config, layout = role_config(CriticConfig, SMALL), ParallelLayout(4)
    call = RoleCall(CriticWorker, config, "", "update_critic", layout, 24, 40)
    outcome = dry_run_of(call, variant_of(config, layout))
    whole = replace(config, optim=replace(config.optim, distributed_optimizer=False))
    other = dry_run_of(replace(call, config=whole), variant_of(whole, layout))
    assert not outcome.failure and not outcome.warnings and not other.failure
    assert outcome.uses[0].idle["optimizer"] < other.uses[0].idle["optimizer"] / 3
