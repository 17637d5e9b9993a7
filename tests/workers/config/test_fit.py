"""Models and axes that do not fit each other are rejected with the numbers, before any process group exists."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mcontroller.errors import ConfigError
from workers.config import ActorConfig, ModelConfig, ParallelConfig, RolloutConfig
from workers.config.fit import check_fit, check_local, length_multiple_of, padded_vocab_size

GPT = ModelConfig(
    vocab_size=100,
    max_sequence_length=64,
    num_layers=4,
    hidden_size=48,
    num_attention_heads=12,
    num_query_groups=4,
)
EXPERTS = {"num_moe_experts": 6}
ROLLOUT = RolloutConfig(prompt_length=8, response_length=8)


@pytest.mark.parametrize(
    ("model", "axes"),
    [
        ({}, {"tp": 4, "pp": 4, "cp": 2}),
        ({}, {"pp": 2, "vpp": 2}),
        ({"max_sequence_length": 63}, {"tp": 2, "sequence_parallel": True}),  # rope has no table of positions to divide
        ({"num_layers": 5, "transformer": {"num_layers_in_first_pipeline_stage": 2}}, {"pp": 2}),
        ({"hidden_size": 50, "kv_channels": 4, "ffn_hidden_size": 64}, {"tp": 2}),
        (EXPERTS, {"tp": 2, "ep": 3, "etp": 1, "sequence_parallel": True}),
    ],
)
def test_a_model_that_the_axes_divide_fits(model: dict[str, Any], axes: dict[str, Any]) -> None:
    assert check_fit(dataclasses.replace(GPT, **model), ParallelConfig(**axes)) is None


@pytest.mark.parametrize(
    ("model", "axes", "key"),
    [
        ({}, {"tp": 5}, "model.num_attention_heads"),
        ({}, {"tp": 3}, "model.num_query_groups"),
        ({"num_query_groups": 5}, {}, "model.num_attention_heads"),
        ({"hidden_size": 50}, {}, "model.hidden_size"),
        ({"hidden_size": 60}, {}, "model.hidden_size"),
        ({"ffn_hidden_size": 75}, {"tp": 2}, "model.ffn_hidden_size"),
        ({}, {"pp": 3}, "model.num_layers"),
        ({}, {"pp": 2, "vpp": 3}, "model.num_layers"),
        ({}, {"vpp": 2}, "parallel.vpp"),
        (
            {"transformer": {"num_layers_in_first_pipeline_stage": 1}},
            {},
            "model.transformer.num_layers_in_first_pipeline_stage",
        ),
        ({}, {"tp": 0}, "parallel.tp"),
        ({}, {"ep": 2}, "parallel.ep"),
        ({}, {"sequence_parallel": True}, "parallel.sequence_parallel"),
        (EXPERTS, {"ep": 4}, "model.num_moe_experts"),
        (EXPERTS, {"tp": 2}, "parallel.sequence_parallel"),
        ({**EXPERTS, "moe_router_topk": 7}, {}, "model.moe_router_topk"),
        ({**EXPERTS, "moe_ffn_hidden_size": 9}, {"etp": 2}, "model.moe_ffn_hidden_size"),
        (
            {**EXPERTS, "transformer": {"moe_router_load_balancing_type": "sinkhorn"}},
            {},
            "model.transformer.moe_router_load_balancing_type",
        ),
        (
            {**EXPERTS, "moe_router_topk": 2, "transformer": {"moe_expert_capacity_factor": 2.9}},
            {},
            "model.transformer.moe_expert_capacity_factor",
        ),
        ({"dtype": "float8"}, {}, "model.dtype"),
        (
            {"position_embedding_type": "learned_absolute", "max_sequence_length": 30},
            {"cp": 2},
            "model.max_sequence_length",
        ),
        ({"activation": "swish"}, {}, "model.activation"),
    ],
)
def test_a_model_that_does_not_fit_is_rejected_with_the_numbers(
    model: dict[str, Any], axes: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_fit(dataclasses.replace(GPT, **model), ParallelConfig(**axes))
    assert caught.value.fields["key"] == key


@pytest.mark.parametrize(
    ("transformer", "key"),
    [
        ({"moe_token_dispatcher_type": "allgather"}, "moe_token_dispatcher_type"),
        ({"moe_router_load_balancing_type": "seq_aux_loss"}, "moe_router_load_balancing_type"),
        ({"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}, "moe_router_load_balancing_type"),
    ],
)
def test_fields_that_packed_rows_do_not_support_are_rejected(transformer: dict[str, Any], key: str) -> None:
    model = dataclasses.replace(GPT, **EXPERTS, transformer=transformer)
    assert ActorConfig(model, rollout=ROLLOUT).packed is False
    with pytest.raises(ConfigError) as caught:
        ActorConfig(model, rollout=ROLLOUT, packed=True)
    assert caught.value.fields["key"] == f"model.transformer.{key}"


@pytest.mark.parametrize(
    "transformer",
    [
        {"mtp_use_repeated_layer": True},
        {"experimental_attention_variant": "gated_delta_net"},
        {"heterogeneous_block_specs": True},
        {"is_hybrid_model": True},
        {"apply_residual_connection_post_layernorm": True},
        {"moe_input_jitter_eps": 0.1},
        {"cuda_graph_impl": "local"},
        {"flash_decode": True},
        {"perform_initialization": False},
        {"use_mup": True},
        {"num_microbatches_with_partial_activation_checkpoints": 1},
        {"qk_clip": True},
        {"cross_entropy_loss_fusion": True},
        {"use_te_rng_tracker": True},
        {"moe_use_legacy_grouped_gemm": True},
        {"transformer_impl": "inference_optimized"},
    ],
)
def test_fields_that_megatron_would_silently_ignore_are_rejected(transformer: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        ActorConfig(dataclasses.replace(GPT, transformer=transformer), rollout=ROLLOUT)
    [key] = transformer
    assert caught.value.fields["key"] == f"model.transformer.{key}"


@pytest.mark.parametrize("transformer", [{"fp8": "hybrid"}, {"cpu_offloading": True}, {"softmax_type": "learnable"}])
def test_local_layers_reject_fields_that_need_transformer_engine(transformer: dict[str, Any]) -> None:
    model = dataclasses.replace(GPT, transformer=transformer)
    check_fit(model, ParallelConfig())
    [name] = transformer
    with pytest.raises(ConfigError) as caught:
        check_local(model, on_gpu=True)
    assert caught.value.fields["key"] == f"model.transformer.{name}"


def test_local_layers_accumulate_gradients_in_place_on_a_cpu_only() -> None:
    model = dataclasses.replace(GPT, transformer={"gradient_accumulation_fusion": True})
    check_local(model, on_gpu=False)
    with pytest.raises(ConfigError) as caught:
        check_local(model, on_gpu=True)
    assert (caught.value.key, caught.value.value) == ("model.transformer.gradient_accumulation_fusion", True)


@pytest.mark.parametrize(
    "transformer",
    [{"moe_token_dispatcher_type": "allgather"}, {"moe_pad_expert_input_to_capacity": True}],
    ids=["allgather", "capacity"],
)
def test_experts_that_need_rows_of_one_length_are_rejected_over_dp(
    transformer: dict[str, Any],
) -> None:
    model = dataclasses.replace(GPT, **EXPERTS, transformer=transformer)
    check_fit(model, ParallelConfig(tp=2, sequence_parallel=True))
    [name] = transformer
    for axes in ({"ep": 2}, {"etp": 2}, {"tp": 2, "etp": 1, "ep": 2, "sequence_parallel": True}):
        with pytest.raises(ConfigError) as caught:
            check_fit(model, ParallelConfig(**axes))
        assert caught.value.fields["key"] == f"model.transformer.{name}"


@pytest.mark.parametrize(
    ("axes", "transformer", "multiple"),
    [
        ({}, {}, 1),
        ({"cp": 3}, {}, 6),
        ({"tp": 4, "sequence_parallel": True}, {}, 4),
        ({"tp": 2, "cp": 2, "sequence_parallel": True}, {}, 8),
        ({"cp": 2}, {"fp8": "hybrid"}, 32),
        ({}, {"fp8": "hybrid", "fp8_recipe": "mxfp8"}, 32),
        ({"cp": 3, "tp": 2, "sequence_parallel": True}, {"fp8": "e4m3"}, 96),
    ],
)
def test_row_lengths_are_rounded_up_to_a_multiple_of_axes_and_fp8_blocks(
    axes: dict[str, Any], transformer: dict[str, Any], multiple: int
) -> None:
    model = dataclasses.replace(GPT, transformer=transformer)
    assert length_multiple_of(model, ParallelConfig(**axes)) == multiple


def test_the_vocabulary_is_padded_to_a_multiple_of_tp() -> None:
    assert [padded_vocab_size(100, tp) for tp in (1, 2, 3, 8)] == [100, 100, 102, 104]
