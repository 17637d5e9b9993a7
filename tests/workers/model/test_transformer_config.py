"""Every field of a model's configuration reaches Megatron's TransformerConfig, by its name and of its type."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Optional, Union

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from mcontroller.errors import ConfigError
from workers.config import ModelConfig, ParallelConfig
from workers.model.transformer_config import coerced, transformer_config

GPT = ModelConfig(vocab_size=100, max_sequence_length=64, num_layers=4, hidden_size=48, num_attention_heads=4)


def with_fields(**fields: Any) -> ModelConfig:
    return dataclasses.replace(GPT, transformer=fields)


def test_model_and_axes_become_megatrons_fields() -> None:
    model = dataclasses.replace(GPT, num_query_groups=2, dtype="bfloat16", activation="relu", init_method_std=0.1)
    config = transformer_config(model, ParallelConfig(tp=2, pp=2, vpp=2, cp=2, sequence_parallel=True))
    assert (config.hidden_size, config.num_query_groups, config.kv_channels, config.ffn_hidden_size) == (48, 2, 12, 192)
    assert (config.params_dtype, config.pipeline_dtype, config.bf16) == (torch.bfloat16, torch.bfloat16, True)
    assert config.activation_func is torch.nn.functional.relu
    assert config.tensor_model_parallel_size == config.context_parallel_size == 2
    assert (config.virtual_pipeline_model_parallel_size, config.sequence_parallel) == (2, True)
    assert (config.attention_dropout, config.hidden_dropout, config.init_method_std) == (0.0, 0.0, 0.1)


def test_interleaved_stages_never_send_as_a_batch() -> None:
    interleaved = transformer_config(GPT, ParallelConfig(pp=2, vpp=2))
    plain = transformer_config(GPT, ParallelConfig(pp=2))
    assert (interleaved.overlap_p2p_comm, interleaved.batch_p2p_comm) == (True, False)
    assert (plain.overlap_p2p_comm, plain.batch_p2p_comm) == (False, True)


def test_stages_free_their_outputs_when_they_are_sent() -> None:
    freed = [transformer_config(GPT, ParallelConfig(pp=pp)).deallocate_pipeline_outputs for pp in (1, 2)]
    kept = transformer_config(with_fields(deallocate_pipeline_outputs=False), ParallelConfig(pp=2))
    assert [*freed, kept.deallocate_pipeline_outputs] == [False, True, False]


def test_other_fields_of_megatron_pass_through_in_their_types() -> None:
    config = transformer_config(
        with_fields(
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
            attention_backend="fused",
            autocast_dtype="bfloat16",
            softmax_scale=1,
            window_size=[3, 0],
        ),
        ParallelConfig(),
    )
    assert (config.recompute_granularity, config.recompute_num_layers) == ("full", 1)
    assert (config.attention_backend, config.autocast_dtype) == (AttnBackend.fused, torch.bfloat16)
    assert (config.softmax_scale, config.window_size) == (1.0, (3, 0))
    assert isinstance(config.softmax_scale, float)


@pytest.mark.parametrize(
    "fields",
    [
        {"recompute_granularty": "full"},
        {"recompute_granularity": "ful"},
        {"recompute_num_layers": "1"},
        {"recompute_num_layers": True},
        {"test_mode": 1},
        {"attention_backend": "mine"},
        {"num_layers": 8},
        {"activation_func": "gelu"},
        {"_cpu_offloading_context": None},
    ],
)
def test_an_unknown_or_ill_typed_field_is_rejected_with_its_key(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        transformer_config(with_fields(**fields), ParallelConfig())
    [name] = fields
    assert caught.value.fields["key"] == f"model.transformer.{name}"


def test_what_megatron_itself_rejects_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError) as caught:
        transformer_config(with_fields(recompute_granularity="full"), ParallelConfig())
    assert caught.value.key == "model"


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (3, Optional[float], 3.0),  # noqa: UP045  # Megatron's own spelling
        (None, Optional[int], None),  # noqa: UP045
        ("vanilla", Literal["vanilla", "learnable"], "vanilla"),
        ([1, 2], Union[int, list[int]], [1, 2]),  # noqa: UP007
        ((1, 2), list[int], [1, 2]),
        ([1, 2], tuple[int, int], (1, 2)),
        ("float16", torch.dtype, torch.float16),
        (torch.float16, torch.dtype, torch.float16),
    ],
)
def test_a_value_is_turned_into_what_the_annotation_takes(value: Any, hint: Any, expected: Any) -> None:
    result = coerced(value, hint)
    assert result == expected and type(result) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint"),
    [("a", int), (1.5, int), ([1, 2, 3], tuple[int, int]), (["a"], list[int]), ("float8", torch.dtype), (1, str)],
)
def test_a_value_of_another_type_is_rejected(value: Any, hint: Any) -> None:
    with pytest.raises(TypeError):
        coerced(value, hint)
