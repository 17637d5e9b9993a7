"""Dry runs of roles: the peak that an H100 had, and the calls of each role."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from mcontroller import DataProto
from parallel_state.dry_run.counting import CountingMode
from parallel_state.dry_run.memory import Memory
from parallel_state.dry_run.outcome import Outcome, Use
from parallel_state.dry_run.run import dry_run_of
from parallel_state.simulated import exchange, run_ranks
from workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker
from workers.config import CriticConfig, LoraConfig, ModelConfig, ParallelConfig, RewardConfig
from workers.dry_run import RoleCall
from workers.gpucheck.policy import FULL, TINY_MODEL, actor_config, role_config
from workers.verify.roles import ModelRole, variant_of

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU"),
]
GIB = 2**30
PROMPT, RESPONSE = 24, 40
BF16 = TINY_MODEL | {"dtype": "bfloat16"}
WIDE = TINY_MODEL | {"hidden_size": 256, "ffn_hidden_size": 1024, "kv_channels": 64}
SIZES = {"ppo_mini_batch_size": 8, "ppo_micro_batch_size": 2}


def model_role(kind: str, ranks: int, **changed: Any) -> ModelRole:
    """Return an actor with its reference, a critic or a reward model on a number of ranks."""
    if kind == "reward":
        sections = {
            "model": ModelConfig(**changed.get("model", WIDE)),
            "parallel": ParallelConfig(**changed["parallel"]),
        }
        config: Any = RewardConfig(**sections, micro_batch_size=2)
    else:
        settings = {"model": WIDE, **SIZES, **changed}
        lengths = {"rollout": {"prompt_length": PROMPT, "response_length": RESPONSE}}
        config = actor_config(settings | lengths) if kind == "actor" else role_config(CriticConfig, settings)
    worker = {"actor": ActorRolloutRefWorker, "critic": CriticWorker, "reward": RewardModelWorker}[kind]
    variant = variant_of(config, config.parallel.layout(ranks))
    return ModelRole(worker, config, "actor_ref" if kind == "actor" else "", variant)


def outcome_of(role: ModelRole, method: str, **chosen: Any) -> Outcome:
    outcome = dry_run_of(RoleCall(role, method, PROMPT, RESPONSE), role.variant, **chosen)
    assert not outcome.failure, outcome.failure
    return outcome


LORA = WIDE | {"lora": LoraConfig(rank=4, alpha=8)}
ROLES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "actor, dp": ("actor", 2, {}),
    "actor, tp and pp": ("actor", 4, {"parallel": {"tp": 2, "pp": 2, "sequence_parallel": True}}),
    "actor, packed": ("actor", 1, {"packed": True, "model": WIDE | {"transformer": {"mtp_num_layers": 1}}}),
    "actor, LoRA": ("actor", 1, {"model": LORA}),
    "critic, cp": ("critic", 2, {"parallel": {"cp": 2}}),
    "reward model, tp": ("reward", 2, {"parallel": {"tp": 2}}),
}


@pytest.mark.parametrize("name", ["actor, dp", "actor, packed", "actor, LoRA", "critic, cp"])
def test_every_call_of_a_role_runs_without_data(name: str) -> None:
    kind, ranks, changed = ROLES[name]
    role = model_role(kind, ranks, **changed)
    peaks = [outcome_of(role, method, second=False).peak for method in (*role.updates, *role.scores)]
    assert peaks[0] == max(peaks) and min(peaks) > 0


@pytest.mark.parametrize("name", ["actor, tp and pp", "critic, cp", "reward model, tp"])
def test_the_peaks_of_a_role_are_those_of_a_real_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 0.4%: a real run on a CPU counts small tensors of the host too, and has another kernel of attention."""
    compute = exchange.compute

    def uncounted(calls: Any) -> None:
        with _disable_current_modes():
            compute(calls)

    monkeypatch.setattr(exchange, "compute", uncounted)
    kind, ranks, changed = ROLES[name]
    role = model_role(kind, ranks, **(changed | {"model": WIDE | {"transformer_impl": "local"}}))

    def on_rank(method: str) -> Use:
        mode = CountingMode(Memory(), "cpu")
        with mode:
            return RoleCall(role, method, PROMPT, RESPONSE)(mode)

    for method in role.updates or role.scores:
        real = run_ranks(role.variant.layout, on_rank, method, check_async=False)
        dry = outcome_of(role, method, every_rank=True).uses
        assert [use.peak for use in dry.values()] == pytest.approx([use.peak for use in real], rel=4e-3)


def test_an_update_of_a_large_model_has_the_peak_of_a_gpu() -> None:
    """53.0 GB (2**30 bytes) on one H100, with local layers; see docs/gpu.md."""
    model = FULL.model | {"dtype": "bfloat16", "transformer_impl": "local"}
    rollout = {"prompt_length": FULL.prompt, "response_length": FULL.response}
    config = actor_config({"ppo_micro_batch_size": 1, "ppo_mini_batch_size": 2, "model": model, "rollout": rollout})
    role = ModelRole(ActorRolloutRefWorker, config, "actor", variant_of(config, config.parallel.layout(1)))
    outcome = dry_run_of(RoleCall(role, "update_actor", FULL.prompt, FULL.response), role.variant)
    assert outcome.peak / GIB == pytest.approx(53.0, rel=0.01)
    (use,) = outcome.uses.values()
    assert use.by_kind["optimizer"] == pytest.approx(12 * use.parameters, rel=0.01)
    assert use.by_kind["gradients"] == pytest.approx(4 * use.parameters, rel=0.01)


def test_an_update_with_transformer_engine_has_the_peak_of_a_gpu() -> None:
    """65.094 GB (2**30 bytes) on one H100, eight rows, two packed in a micro-batch; see docs/results.md."""
    config = FULL.config("transformer_engine")
    role = ModelRole(ActorRolloutRefWorker, config, "actor", variant_of(config, config.parallel.layout(1)))
    outcome = dry_run_of(RoleCall(role, "update_actor", FULL.prompt, FULL.response), role.variant)
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
