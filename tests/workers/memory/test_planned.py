"""Memory from dry runs of few layers equals that of the whole model, and small layouts are scaled to large ones."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from workers import ActorRolloutRefWorker
from workers.config import ActorConfig, load_config
from workers.dry_run import RoleCall
from workers.layout_search import search_layouts
from workers.memory import planned
from workers.memory.nccl import nccl_bytes
from workers.memory.planned import estimated, stage_uses
from workers.memory.without_gpus import without_gpus
from workers.role_calls import Lengths, host_memory
from workers.verify.roles import ModelRole, variant_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
simulated = pytest.mark.simulated

MODEL = {
    "vocab_size": 512,
    "max_sequence_length": 64,
    "num_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 256,
    "dtype": "bfloat16",
}
SIZES = {"ppo_mini_batch_size": 64, "ppo_micro_batch_size": 2, "rollout": {"prompt_length": 24, "response_length": 40}}


def experts(**transformer: Any) -> dict[str, Any]:
    sizes = {"num_moe_experts": 8, "moe_ffn_hidden_size": 128, "moe_router_topk": 2}
    return MODEL | sizes | {"transformer": transformer}


def actor(model: dict[str, Any], parallel: dict[str, Any], **optim: Any) -> ActorConfig:
    optimizer = {"distributed_optimizer": True, **optim}
    return load_config(ActorConfig, {"model": model, "parallel": parallel, "optim": optimizer}, SIZES)


def update(config: ActorConfig, ranks: int) -> RoleCall:
    config = replace(config, model=replace(config.model, transformer_impl="local"))
    role = ModelRole(ActorRolloutRefWorker, config, "actor", variant_of(config, config.parallel.layout(ranks)))
    return RoleCall(role, "update_actor", 24, 40, micro_batches=3)


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "uneven stages": (MODEL | {"transformer": {"num_layers_in_first_pipeline_stage": 3}}, {"pp": 2}, 2),
    "some layers with experts": (
        experts(moe_layer_freq=[0, 0, 0, 1, 1, 1, 1, 1]),
        {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "sequence_parallel": True},
        4,
    ),
    "frozen layers": (MODEL | {"freeze": ["decoder.layers.[0-3].*"]}, {"pp": 2}, 2),
    "layers recomputed in pairs": (
        MODEL
        | {
            "transformer": {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 2,
            }
        },
        {},
        2,
    ),
}


@simulated
@pytest.mark.parametrize(("model", "parallel", "ranks"), LAYOUTS.values(), ids=LAYOUTS)
def test_few_layers_give_the_memory_of_the_whole_model(
    model: dict[str, Any], parallel: dict[str, Any], ranks: int
) -> None:
    call = update(actor(model, parallel), ranks)
    for few, whole in zip(stage_uses(call), planned._run(call), strict=True):
        assert few.weights == whole.weights and few.trained_experts == whole.trained_experts
        assert few.idle["optimizer"] == pytest.approx(whole.idle["optimizer"], rel=0.01)  # buckets are padded
        assert few.peak == pytest.approx(whole.peak, rel=0.02)


@simulated
def test_experts_that_tp_does_not_divide_are_counted_once() -> None:
    model = experts()
    (use,) = stage_uses(update(actor(model, {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}), 2))
    assert use.experts == 8 * (8 // 2) * 3 * 64 * 128  # layers, experts of a rank, matrices


@simulated
def test_an_optimizer_in_host_memory_is_counted_there() -> None:
    """Megatron's default of the fraction is 0."""
    whole = update(actor(MODEL, {}), 1)
    (all_on_gpu,) = stage_uses(whole)
    for fraction, share in (({}, 0.0), ({"optimizer_offload_fraction": 0.75}, 0.75)):
        call = update(actor(MODEL, {}, megatron={"optimizer_cpu_offload": True} | fraction), 1)
        outcome = estimated(call)
        (use,) = outcome.uses.values()
        assert use.idle["optimizer"] == pytest.approx((1 - share) * all_on_gpu.idle["optimizer"], rel=0.01)
        host = host_memory(outcome, call.role)
        assert host.offloaded == pytest.approx((2 + 12) * all_on_gpu.weights, rel=0.01)


@simulated
def test_a_layout_of_the_search_has_the_memory_of_its_own_dry_run() -> None:
    config = actor(experts(), {})
    search = search_layouts(config, [1] * 16, Lengths(24, 40, 8), 80 * 2**30, layers="local")
    layouts = {(one.parallel.pp, one.parallel.ep): one for one in search.fitting}
    for axes in ((4, 4), (1, 8)):
        found = layouts[axes]
        call = update(replace(config, parallel=found.parallel), 16)
        layout = call.role.variant.layout
        largest = max(use.peak for use in stage_uses(replace(call, micro_batches=min(5, 32 // layout.dp))))
        nccl = nccl_bytes(layout, experts=True, sharded=True)
        assert found.memory - nccl == pytest.approx(largest, rel=0.02)


@simulated
def test_layouts_are_searched_for_adapters_of_layers_by_number() -> None:
    """A model with fewer layers has no layer 6."""
    sizes = {"lora": {"rank": 4, "alpha": 8.0, "targets": ["layers.6.*.q_proj"]}}
    search = search_layouts(actor(MODEL | sizes, {}), [4], Lengths(24, 40, 8), 80 * 2**30, layers="local")
    assert {(one.parallel.tp, one.parallel.pp) for one in search.fitting} == {
        (1, 1),
        (1, 2),
        (1, 4),
        (2, 1),
        (2, 2),
        (4, 1),
    }
    assert search.rejected == []


@simulated
def test_a_call_that_fails_without_data_says_why() -> None:
    class Reads(ActorRolloutRefWorker):
        def update_actor(self, batch: Any) -> Any:
            raise RuntimeError("needs data")

    call = update(actor(MODEL, {}), 1)
    failed = estimated(replace(call, role=replace(call.role, worker_class=Reads)))
    assert "needs data" in failed.failure and not failed.uses
    assert estimated(call).peak > 0


@pytest.mark.processes
def test_a_machine_with_gpus_computes_in_a_process_that_sees_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert without_gpus(os.getenv)("CUDA_VISIBLE_DEVICES", "unset") == ""


@pytest.mark.parametrize(
    ("ranks", "axes", "gigabytes"),
    [
        (1, {}, 0),
        (2, {"tp": 2}, 0.75),  # all ranks, tp, and the norm of the gradient
        (8, {}, 3),  # all ranks, dp, and dp with cp
        (8, {"tp": 2, "pp": 2}, 2 + 4 * 0.25),  # all ranks and the norm; tp, pp, dp, and dp with cp
    ],
)
def test_a_communicator_of_more_than_two_ranks_counts_as_one_gigabyte(
    ranks: int, axes: dict[str, Any], gigabytes: float
) -> None:
    layout = actor(MODEL, axes).parallel.layout(ranks)
    assert nccl_bytes(layout, experts=False, sharded=False) == gigabytes * 2**30
