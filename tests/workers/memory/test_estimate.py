"""Estimated memory equals the parameters of real models, and the bytes that the fake CUDA device counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcontroller.errors import ConfigError
from tests.ranks import run_ranks
from tests.workers.memory.counted import BF16, EXPERTS, RECOMPUTED, SHARDED, WHOLE, Layout, far_off
from tests.workers.roles import MODEL, actor, critic
from workers import ModelConfig, OptimConfig, ParallelConfig
from workers.config import ActorConfig, load_config
from workers.memory.activations import Tokens, layer_gradients, layer_passing
from workers.memory.estimate import PlannedRole, host_memory
from workers.memory.parameters import Parameters, Shape, count_parameters

LAYOUTS: dict[str, Layout] = {
    "tp 2, sequence parallel, bfloat16": ({"tp": 2, "sequence_parallel": True}, BF16, {}),
    "pp 2, float32": ({"pp": 2}, {}, {}),
    "dp 2, sharded optimizer, bfloat16, recomputed": ({}, BF16 | {"transformer": RECOMPUTED}, SHARDED),
    "ep 2, sharded optimizer, bfloat16": ({"ep": 2}, BF16 | EXPERTS, SHARDED),
    "tp 2, etp 1, ep 2, sequence parallel, bfloat16": (
        {"tp": 2, "etp": 1, "ep": 2, "sequence_parallel": True},
        BF16 | EXPERTS,
        SHARDED,
    ),
    "tp 2, etp 2, sequence parallel, bfloat16, experts": ({"tp": 2, "sequence_parallel": True}, BF16 | EXPERTS, {}),
    "pp 2, vpp 2, bfloat16": ({"pp": 2, "vpp": 2}, BF16, {}),
    "cp 2, bfloat16, MLP and norms recomputed": (
        {"cp": 2},
        BF16 | {"transformer": {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]}},
        SHARDED,
    ),
    "tp 2, sequence parallel, bfloat16, attention recomputed": (
        {"tp": 2, "sequence_parallel": True},
        BF16 | {"transformer": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}},
        {},
    ),
    "ep 2, bfloat16, activation of experts recomputed": (
        {"ep": 2},
        BF16 | EXPERTS | {"transformer": {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}},
        WHOLE,
    ),
}

LATENT: dict[str, Any] = {
    "qk_layernorm": True,
    "num_query_groups": 4,
    "kv_channels": 12,
    "transformer": {
        "multi_latent_attention": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 6,
        "rope_type": "rope",
    },
}
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "dense": ({"tp": 2}, {}, False),
    "stages": ({"pp": 2, "vpp": 2}, {"tie_embeddings": True}, False),
    "tied": ({}, {"tie_embeddings": True}, False),
    "biases": ({"tp": 2}, {"add_bias_linear": True, "normalization": "LayerNorm", "gated_linear_unit": False}, False),
    "learned positions": ({"pp": 2}, {"position_embedding_type": "learned_absolute", "add_qkv_bias": True}, False),
    "head norms, value head": ({"pp": 2}, {"qk_layernorm": True, "tie_embeddings": True}, True),
    "experts": ({"ep": 2, "tp": 2, "sequence_parallel": True}, EXPERTS, False),
    "adapters": (
        {"ep": 2, "tp": 2, "etp": 2, "sequence_parallel": True},
        EXPERTS
        | {"qk_layernorm": True}
        | {"lora": {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "linear_proj", "linear_fc1", "down_proj"]}},
        False,
    ),
    "some layers with experts": (
        {"ep": 2, "pp": 2},
        EXPERTS | {"transformer": {"moe_layer_freq": 2, "moe_shared_expert_intermediate_size": 96}},
        True,
    ),
    "latent attention": ({"tp": 2, "sequence_parallel": True}, LATENT, False),
    "latent attention, queries as they are": (
        {"pp": 2},
        LATENT | {"transformer": {**LATENT["transformer"], "q_lora_rank": None}},
        False,
    ),
}


def built(parallel: dict[str, Any], model: dict[str, Any], value_head: bool) -> tuple[int, Parameters]:
    worker = (critic if value_head else actor)(parallel, **({} if value_head else {"role": "rollout"}), model=model)
    counted = {True: 0, False: 0}
    for chunk in worker.model:
        for parameter in chunk.parameters():
            counted[getattr(parameter, "allreduce", True)] += parameter.numel()
    return worker.context.pg.pp.rank(), Parameters(counted[True], counted[False])


@pytest.mark.simulated
@pytest.mark.parametrize(("parallel", "model", "value_head"), SHAPES.values(), ids=SHAPES)
def test_parameters_are_counted_exactly(parallel: dict[str, Any], model: dict[str, Any], value_head: bool) -> None:
    config, axes = load_config(ModelConfig, MODEL | model), ParallelConfig(**parallel)
    for pp_rank, real in run_ranks(built, 4, parallel, model, value_head):
        estimated = count_parameters(config, axes, pp_rank, value_head=value_head)
        if "ep" not in parallel:  # then Megatron replicates experts as it does all parameters
            estimated = Parameters(estimated.dense + estimated.expert)
        assert estimated == real


@pytest.mark.processes
@pytest.mark.skipif(not torch.cuda.is_available(), reason="bytes are counted on a fake CUDA device, or on a GPU")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_estimates_are_within_a_tenth_of_the_counted_bytes(layout: Layout) -> None:
    assert far_off(layout) == {}


def test_a_model_whose_parameters_are_not_counted_is_rejected_by_its_field() -> None:
    model = load_config(ModelConfig, MODEL)
    with pytest.raises(ConfigError) as caught:
        PlannedRole(
            load_config(ModelConfig, MODEL | {"transformer": {"attention_output_gate": True}}), ParallelConfig(), 1
        )
    assert (caught.value.key, caught.value.value) == ("model.transformer.attention_output_gate", True)
    assert PlannedRole(model, ParallelConfig(), 1).idle(0).gradients == 0


def test_experts_that_tp_does_not_divide_compute_the_tokens_of_one_rank() -> None:
    config = load_config(ModelConfig, MODEL | EXPERTS | {"num_query_groups": 4})
    whole = Shape(config, ParallelConfig(ep=4))
    divided = Shape(config, ParallelConfig(tp=4, ep=4, etp=1, sequence_parallel=True))
    tokens, of_rank = Tokens(1024, 256, 2), Tokens(256, 256, 2)
    assert layer_gradients(divided, tokens, True) == layer_gradients(whole, of_rank, True)
    assert layer_passing(divided, tokens, True) == layer_passing(whole, of_rank, True)


@pytest.mark.parametrize(
    ("settings", "per_parameter"),
    [
        ({}, 12),
        ({"optimizer_cpu_offload": True}, 12),  # Megatron's default of the fraction is 0
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.25}, 9),
        ({"use_precision_aware_optimizer": True}, 10),  # the weights are the upper half of the float32 copies
        ({"use_precision_aware_optimizer": True, "store_param_remainders": False}, 12),
        ({"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}, 6),
    ],
)
def test_an_optimizer_has_the_bytes_of_its_settings_and_of_defaults(
    settings: dict[str, Any], per_parameter: int
) -> None:
    model = load_config(ModelConfig, MODEL | BF16)
    optim = OptimConfig(distributed_optimizer=True, megatron=settings)
    role = PlannedRole(model, ParallelConfig(), 1, optim)
    trained = role.trained(0)
    assert role.idle(0).optimizer == per_parameter * trained.dense
    config = load_config(ActorConfig, {"model": MODEL | BF16, "optim": {"megatron": settings}})
    host = host_memory(config, 1, trained=True, models=1)
    whole = max(per_parameter, 12) if "optimizer_offload_fraction" in settings else per_parameter
    assert host.offloaded == (2 + whole) * trained.dense


@pytest.mark.parametrize(
    ("ranks", "parallel", "gigabytes"),
    [
        (1, {}, 0),
        (2, {"tp": 2}, 0.75),  # all ranks, tp, and the norm of the gradient
        (8, {}, 3),  # all ranks, dp, and dp with cp
        (8, {"tp": 2, "pp": 2}, 2 + 4 * 0.25),  # all ranks and the norm; tp, pp, dp, and dp with cp
    ],
)
def test_a_communicator_of_more_than_two_ranks_counts_as_one_gigabyte(
    ranks: int, parallel: dict[str, Any], gigabytes: float
) -> None:
    role = PlannedRole(load_config(ModelConfig, MODEL), ParallelConfig(**parallel), ranks)
    assert role.nccl() == gigabytes * 2**30
