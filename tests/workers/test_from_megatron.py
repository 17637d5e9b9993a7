"""Layouts and models from Megatron-LM's arguments and from TransformerConfig."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import pytest
import torch

from mcontroller.errors import ConfigError
from workers import ModelConfig, ParallelConfig, model_config_from_megatron
from workers.model.transformer_config import transformer_config

# As Megatron-LM's parser and validate_args leave them, for the fields that are read.
ARGUMENTS: dict[str, Any] = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 4,
    "context_parallel_size": 2,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "virtual_pipeline_model_parallel_size": 2,
    "num_layers_per_virtual_pipeline_stage": 1,
    "use_tp_pp_dp_mapping": False,
    "sequence_parallel": True,
    "num_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "group_query_attention": True,
    "num_query_groups": 2,
    "ffn_hidden_size": 96,
    "kv_channels": 8,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "swiglu": True,
    "squared_relu": False,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "qk_layernorm": False,
    "position_embedding_type": "rope",
    "rotary_base": 500000,
    "rotary_percent": 1.0,
    "use_rope_scaling": True,
    "rope_scaling_factor": 8.0,
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.0,
    "init_method_std": 0.01,
    "num_experts": None,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": None,
    "bf16": True,
    "fp16": False,
    "params_dtype": torch.bfloat16,
    "vocab_size": 127,
    "padded_vocab_size": 128,
    "seq_length": 32,
    "max_position_embeddings": 48,
}


def arguments(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**(ARGUMENTS | changes))


def test_the_layout_is_that_of_the_arguments() -> None:
    expected = ParallelConfig(tp=2, pp=4, cp=2, ep=1, vpp=2, sequence_parallel=True)
    assert ParallelConfig.from_megatron_args(arguments()) == expected
    mapped = ParallelConfig.from_megatron_args(arguments(use_tp_pp_dp_mapping=True))
    assert mapped == dataclasses.replace(expected, order="tp-cp-ep-pp-dp")
    with pytest.raises(AttributeError):
        ParallelConfig.from_megatron_args(vars(arguments()))


def test_virtual_stages_in_layers_are_rejected() -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelConfig.from_megatron_args(arguments(virtual_pipeline_model_parallel_size=None))
    assert (caught.value.key, caught.value.value) == ("parallel.vpp", 1)


def test_the_model_is_that_of_the_arguments() -> None:
    assert model_config_from_megatron(arguments()) == ModelConfig(
        vocab_size=127,
        max_sequence_length=48,
        num_layers=8,
        hidden_size=64,
        num_attention_heads=8,
        num_query_groups=2,
        ffn_hidden_size=96,
        kv_channels=8,
        layernorm_epsilon=1e-6,
        add_qkv_bias=True,
        rotary_base=500000,
        rope_scaling_factor=8.0,
        attention_dropout=0.1,
        init_method_std=0.01,
        dtype="bfloat16",
    )
    plain = arguments(group_query_attention=False, num_query_groups=1, swiglu=False, squared_relu=True)
    model = model_config_from_megatron(plain)
    assert (model.num_query_groups, model.activation, model.gated_linear_unit) == (None, "squared_relu", False)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_query_groups": 2, "activation": "gelu_tanh", "gated_linear_unit": False, "normalization": "LayerNorm"},
        {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "dtype": "bfloat16"},
        {"add_bias_linear": True, "qk_layernorm": True, "hidden_dropout": 0.1, "layernorm_epsilon": 1e-6},
    ],
)
def test_a_transformer_config_describes_the_model_that_it_was_made_of(changes: dict[str, Any]) -> None:
    model = ModelConfig(
        vocab_size=61, max_sequence_length=32, num_layers=4, hidden_size=32, num_attention_heads=4, **changes
    )
    parallel = ParallelConfig(tp=2, pp=2, vpp=2, sequence_parallel=True)
    source = transformer_config(model, parallel)
    described = model_config_from_megatron(source, vocab_size=61, max_sequence_length=32)
    rebuilt = transformer_config(described, ParallelConfig.from_megatron_args(source))
    differing = [
        field.name
        for field in dataclasses.fields(rebuilt)
        if not callable(getattr(rebuilt, field.name)) and getattr(rebuilt, field.name) != getattr(source, field.name)
    ]
    assert differing == []
    assert rebuilt.activation_func is source.activation_func


COMPUTED: list[tuple[str, Any]] = [
    ("softmax_scale", 0.5),
    ("qk_l2_norm", True),
    ("window_size", (7, 0)),
    ("attention_output_gate", True),
    ("activation_func_clamp_value", 7.0),
    ("layernorm_zero_centered_gamma", True),
]


@pytest.mark.parametrize(("name", "value"), COMPUTED)
def test_field_that_changes_what_is_computed_is_not_read_over(name: str, value: Any) -> None:
    sizes = {"vocab_size": 61, "max_sequence_length": 32}
    model = ModelConfig(**sizes, num_layers=4, hidden_size=32, num_attention_heads=4)
    config = dataclasses.replace(transformer_config(model, ParallelConfig()), **{name: value})
    for source in (config, arguments(**{name: value})):
        with pytest.raises(ConfigError) as caught:
            model_config_from_megatron(source, **sizes)
        assert (caught.value.key, caught.value.value) == (f"model.{name}", value)
        actual = model_config_from_megatron(source, **sizes, transformer={name: value})
        assert actual.transformer == {name: value}


def test_router_of_other_experts_is_not_read_over() -> None:
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 32, "moe_router_score_function": "sigmoid"}
    with pytest.raises(ConfigError) as caught:
        model_config_from_megatron(arguments(**experts))
    assert caught.value.key == "model.moe_router_score_function"


def test_fused_gelu_is_the_approximation_that_its_kernel_computes() -> None:
    plain = arguments(swiglu=False, add_bias_linear=True, bias_gelu_fusion=True)
    assert model_config_from_megatron(plain).activation == "gelu_tanh"
    assert model_config_from_megatron(arguments(swiglu=False, bias_gelu_fusion=False)).activation == "gelu"


def test_arguments_of_the_training_loop_change_nothing() -> None:
    of_loop = {"tp_comm_overlap": True, "cross_entropy_loss_fusion": True, "recompute_granularity": "full"}
    of_loop |= {"attention_softmax_in_fp32": False, "moe_aux_loss_coeff": 0.01, "transformer_impl": "local"}
    assert model_config_from_megatron(arguments(**of_loop)) == model_config_from_megatron(arguments())


@pytest.mark.parametrize(
    ("given", "unused"),
    [
        ({}, {"moe_router_topk": 1, "moe_ffn_hidden_size": 64}),
        ({"position_embedding_type": "learned_absolute"}, {"rotary_base": 500000, "use_rope_scaling": True}),
    ],
)
def test_arguments_of_what_a_model_does_not_have_change_nothing(given: dict[str, Any], unused: dict[str, Any]) -> None:
    assert model_config_from_megatron(arguments(**given, **unused)) == model_config_from_megatron(arguments(**given))


def test_what_a_model_config_does_not_have_is_rejected() -> None:
    with pytest.raises(ConfigError) as caught:
        model_config_from_megatron(arguments(multi_latent_attention=True))
    assert (caught.value.key, caught.value.value) == ("model.multi_latent_attention", True)
    with pytest.raises(ConfigError) as caught:
        model_config_from_megatron(arguments(position_embedding_type="yarn"))
    assert (caught.value.key, caught.value.value) == ("model.position_embedding_type", "yarn")
    with pytest.raises(ConfigError) as caught:
        model_config_from_megatron(arguments(vocab_size=None))
    assert (caught.value.key, caught.value.value) == ("model.vocab_size", None)
