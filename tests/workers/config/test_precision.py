"""Low precision that would not be computed, or that a GPU lacks, is rejected with an error that names the field."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mcontroller.errors import ConfigError
from workers.config import ModelConfig, ParallelConfig
from workers.config.fit import check_fit, check_packing, length_multiple_of

GPT = ModelConfig(
    vocab_size=100,
    max_sequence_length=64,
    num_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    ffn_hidden_size=128,
    dtype="bfloat16",
)
SEQUENCE_PARALLEL = {"tp": 2, "sequence_parallel": True}


def gpt(*, experts: bool = False, **extra: Any) -> ModelConfig:
    more = {"num_moe_experts": 4, "moe_ffn_hidden_size": 48} if experts else {}
    return dataclasses.replace(GPT, transformer=extra, **more)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_supported_recipes_fit_and_pack(recipe: str) -> None:
    model = gpt(fp8="hybrid", fp8_recipe=recipe)
    check_fit(model, ParallelConfig(pp=2))
    check_packing(model)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fp8_recipe", "custom"),
        ("fp8_param", True),
        ("fp8_wgrad", False),
        ("fp8_dot_product_attention", True),
        ("fp8_multi_head_attention", True),
        ("fp4", "e2m1"),
    ],
)
def test_unsupported_fields_are_rejected(field: str, value: Any) -> None:
    fields = {"fp8": "hybrid", field: value} if field != "fp4" else {field: value}
    with pytest.raises(ConfigError) as caught:
        check_fit(gpt(**fields), ParallelConfig())
    assert caught.value.fields["key"] == f"model.transformer.{field}"


@pytest.mark.parametrize(
    ("axes", "recipe", "multiple"),
    [
        ({}, "delayed", 16),
        ({}, "mxfp8", 32),
        ({"cp": 2}, "blockwise", 32),
        (SEQUENCE_PARALLEL, "delayed", 32),
        (SEQUENCE_PARALLEL, "mxfp8", 64),
        (SEQUENCE_PARALLEL, "blockwise", 256),
        ({"tp": 2}, "mxfp8", 32),
        (SEQUENCE_PARALLEL | {"cp": 3}, "tensorwise", 96),
    ],
)
def test_rows_have_whole_blocks_on_every_rank(axes: dict[str, Any], recipe: str, multiple: int) -> None:
    assert length_multiple_of(gpt(fp8="hybrid", fp8_recipe=recipe), ParallelConfig(**axes)) == multiple
