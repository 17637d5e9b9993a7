"""Dry runs of roles: the peak that an H100 had, and the calls of each role."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcontroller import DataProto
from parallel_state.dry_run.outcome import Outcome
from parallel_state.dry_run.run import dry_run_of
from tests.workers.dry_runs import CASES, PROMPT, RESPONSE, TINY_MODEL, WIDE, compared, model_role
from workers import ActorRolloutRefWorker
from workers.dry_run import RoleCall
from workers.gpucheck.scale import FULL
from workers.memory.planned import estimated
from workers.parity.cases import LARGE
from workers.parity.roles import actor_config
from workers.verify.roles import ModelRole, variant_of

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU"),
]
GIB = 2**30
BF16 = TINY_MODEL | {"dtype": "bfloat16"}


def outcome_of(role: ModelRole, method: str, **chosen: Any) -> Outcome:
    outcome = dry_run_of(RoleCall(role, method, PROMPT, RESPONSE), role.variant, **chosen)
    assert not outcome.failure, outcome.failure
    return outcome


@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_a_call_is_that_of_a_real_run(name: str) -> None:
    for real, dry in compared(CASES[name]):
        assert dry.peak == pytest.approx(real.peak, rel=1e-3)


def test_every_call_runs_with_multi_token_prediction() -> None:
    role = model_role("actor", 1, packed=True, model=WIDE | {"transformer": {"mtp_num_layers": 1}})
    peaks = [outcome_of(role, method, second=False).peak for method in (*role.updates, *role.scores)]
    assert peaks[0] == max(peaks) and min(peaks) > 0


def test_an_update_of_a_large_model_has_the_peak_of_a_gpu() -> None:
    """53.0 GB (2**30 bytes) on one H100, with local layers; see docs/gpu.md."""
    model = LARGE | {"dtype": "bfloat16", "transformer_impl": "local"}
    rollout = {"prompt_length": 1024, "response_length": 7168}
    config = actor_config({"ppo_micro_batch_size": 1, "ppo_mini_batch_size": 2, "model": model, "rollout": rollout})
    role = ModelRole(ActorRolloutRefWorker, config, "actor", variant_of(config, config.parallel.layout(1)))
    outcome = dry_run_of(RoleCall(role, "update_actor", 1024, 7168), role.variant)
    assert outcome.peak / GIB == pytest.approx(53.0, rel=0.01)
    (use,) = outcome.uses.values()
    assert use.by_kind["optimizer"] == pytest.approx(12 * use.weights, rel=0.01)
    assert use.by_kind["gradients"] == pytest.approx(4 * use.weights, rel=0.01)


def test_an_update_with_transformer_engine_has_the_peak_of_a_gpu() -> None:
    """65.094 GB (2**30 bytes) on one H100, eight rows, two packed in a micro-batch; see docs/results.md."""
    config = replace(FULL, model=replace(FULL.model, transformer_impl="transformer_engine"))
    role = ModelRole(ActorRolloutRefWorker, config, "actor", variant_of(config, config.parallel.layout(1)))
    outcome = dry_run_of(RoleCall(role, "update_actor", 1024, 7168), role.variant)
    assert outcome.peak / GIB == pytest.approx(65.094, rel=0.01)


def test_a_critic_in_data_parallel_ranks_has_a_part_of_the_optimizer() -> None:
    role = model_role("critic", 4, model=BF16)
    outcome = outcome_of(role, "update_critic")
    config = replace(role.config, optim=replace(role.config.optim, distributed_optimizer=False))
    whole = outcome_of(replace(role, config=config, variant=variant_of(config, role.variant.layout)), "update_critic")
    assert not outcome.warnings
    assert outcome.uses[0].idle["optimizer"] < whole.uses[0].idle["optimizer"] / 3


@pytest.mark.parametrize(("fraction", "share"), [({}, 1.0), ({"optimizer_offload_fraction": 0.75}, 0.25)])
def test_an_optimizer_in_host_memory_is_not_on_the_device(fraction: dict[str, float], share: float) -> None:
    """Megatron's default of the fraction is 0."""
    role = model_role("actor", 1, model=BF16)
    megatron = {"optimizer_cpu_offload": True} | fraction
    other = replace(role, config=replace(role.config, optim=replace(role.config.optim, megatron=megatron)))
    (whole,) = outcome_of(role, "update_actor").uses.values()
    (use,) = outcome_of(other, "update_actor").uses.values()
    assert use.idle["optimizer"] == pytest.approx(share * whole.idle["optimizer"], abs=1)
    assert whole.peak - use.peak == pytest.approx((1 - share) * whole.idle["optimizer"], abs=1)


HALF = {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("fields", "size"), [({}, 2 + 4 + 4), (HALF, 2 + 2 + 2), ({"store_param_remainders": False}, 4 + 4 + 4)]
)
def test_precision_aware_adam_has_half_a_copy_of_bfloat16_weights(fields: dict[str, Any], size: int) -> None:
    """Transformer Engine's FusedAdam stores the 16 bits that bfloat16 weights lack, and the moments in their dtypes."""
    role = model_role("actor", 1, model=BF16)
    megatron = {"use_precision_aware_optimizer": True} | fields
    role = replace(role, config=replace(role.config, optim=replace(role.config.optim, megatron=megatron)))
    (use,) = outcome_of(role, "update_actor").uses.values()
    assert use.idle["optimizer"] == pytest.approx(size * use.trained, rel=0.01)


@pytest.mark.parametrize(
    ("counted", "fields"),
    [
        (True, {"transformer": {"window_size": [4, 0], "window_attn_skip_freq": 2, "softmax_type": "learnable"}}),
        (False, {"transformer": {"cpu_offloading": True, "cpu_offloading_num_layers": 1}}),
        (False, {"num_moe_experts": 4, "add_bias_linear": True, "gated_linear_unit": False}),
    ],
)
def test_what_only_transformer_engine_computes_is_counted_or_has_no_estimate(
    counted: bool, fields: dict[str, Any]
) -> None:
    role = model_role("actor", 1, model=BF16 | {"transformer_impl": "transformer_engine"} | fields)
    outcome = estimated(RoleCall(role, "update_actor", PROMPT, RESPONSE))
    assert (outcome.peak > 0, not outcome.failure) == (counted, counted)


class Branches(ActorRolloutRefWorker):
    """A value of the device decides whether the batch is updated once more."""

    def update_actor(self, batch: DataProto) -> DataProto:
        if torch.rand(2000, device="meta").sum() > 2000:
            super().update_actor(batch)
        return super().update_actor(batch)


def test_a_branch_on_a_value_that_nobody_knows_is_a_warning_with_its_line() -> None:
    role = replace(model_role("actor", 1), worker_class=Branches)
    assert not outcome_of(model_role("actor", 1), "update_actor").warnings
    (warning,) = outcome_of(role, "update_actor").warnings
    assert "test_dry_run.py" in warning and "update_actor" in warning


class ReducesOnce(ActorRolloutRefWorker):
    """One rank takes part in a reduction that the others do not call."""

    def update_actor(self, batch: DataProto) -> DataProto:
        if dist.get_rank() == 5:
            dist.all_reduce(torch.zeros(1, device="meta"))
        return super().update_actor(batch)


def test_a_fault_on_a_rank_that_no_pipeline_has_is_found_with_one_layer_on_each_stage() -> None:
    role = model_role("actor", 8, parallel={"tp": 2, "pp": 2})
    call = RoleCall(replace(role, worker_class=ReducesOnce), "update_actor", PROMPT, RESPONSE)
    assert not dry_run_of(call, role.variant).failure
    assert dry_run_of(call, role.variant, small=call.small()).failure
    right = RoleCall(role, "update_actor", PROMPT, RESPONSE)
    outcome = dry_run_of(right, role.variant, small=right.small())
    assert (outcome.failure, outcome.warnings) == ("", [])


@pytest.mark.parametrize("kind", ["actor", "critic"])
def test_mini_batches_in_prompts_have_all_micro_batches_in_flight(kind: str) -> None:
    role = model_role(kind, 2, parallel={"pp": 2}, ppo_mini_batch_size=256, ppo_mini_batch_prompts=8)
    assert RoleCall(role, role.updates[0], PROMPT, RESPONSE).rows == (2, 3)


def test_rows_of_one_layer_on_each_stage_are_no_longer_than_those_of_the_run() -> None:
    role = model_role("critic", 4, model=WIDE | {"max_sequence_length": 12}, parallel={"tp": 2})
    call = RoleCall(role, "update_critic", 8, 4)
    assert not dry_run_of(call, role.variant, small=call.small()).warnings
