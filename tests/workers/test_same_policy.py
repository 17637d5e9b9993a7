"""Two groups have one policy only if every field that enters the computation is equal."""

from __future__ import annotations

from typing import Any

import pytest

from mcontroller.errors import ConfigError
from tests.workers.roles import MODEL
from workers.config import ActorConfig, load_config
from workers.same_policy import check_same_policy

EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 32, "qk_layernorm": True}
SEQUENCE = {"tp": 2, "sequence_parallel": True}
LATENT = {"transformer": {"multi_latent_attention": True, "q_lora_rank": None, "kv_lora_rank": 16}}


def config_of(model: dict[str, Any], changes: dict[str, Any], **other: Any) -> ActorConfig:
    return load_config(ActorConfig, {"model": MODEL | model}, {"model": changes}, other)


@pytest.mark.parametrize(
    ("model", "changes", "key", "values"),
    [
        ({}, {"transformer": {"softmax_scale": 0.5}}, "transformer.softmax_scale", (None, 0.5)),
        ({}, {"transformer": {"window_size": [7, 0]}}, "transformer.window_size", (None, (7, 0))),
        ({}, {"transformer": {"rotary_interleaved": True}}, "transformer.rotary_interleaved", (False, True)),
        ({}, {"transformer": {"qk_l2_norm": True}}, "transformer.qk_l2_norm", (False, True)),
        ({}, {"activation": "gelu"}, "activation", None),
        (
            {"activation": "gelu", "gated_linear_unit": False, "add_bias_linear": True},
            {"transformer": {"bias_activation_fusion": True}},
            "transformer.bias_activation_fusion",
            (False, True),
        ),
        ({}, {"rotary_base": 500000}, "rotary_base", (10000, 500000)),
        ({}, {"rope_scaling_factor": 8.0}, "rope_scaling_factor", (None, 8.0)),
        ({}, {"layernorm_epsilon": 1e-6}, "layernorm_epsilon", (1e-5, 1e-6)),
        ({"position_embedding_type": "learned_absolute"}, {"max_sequence_length": 64}, "max_sequence_length", (32, 64)),
        (EXPERTS, {"moe_router_topk": 3}, "moe_router_topk", (2, 3)),
        (
            EXPERTS,
            {"transformer": {"moe_router_topk_scaling_factor": 2.5}},
            "transformer.moe_router_topk_scaling_factor",
            (None, 2.5),
        ),
        (LATENT, {"transformer": {"mscale_all_dim": 1.0}}, "transformer.mscale_all_dim", (0.0, 1.0)),
        (LATENT, {"transformer": {"rotary_scaling_factor": 4}}, "transformer.rotary_scaling_factor", (40.0, 4.0)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_field_that_enters_the_computation_is_named_if_it_differs(
    model: dict[str, Any], changes: dict[str, Any], key: str, values: tuple[Any, Any] | None
) -> None:
    actor, rollout = config_of(model, {}), config_of(model, changes)
    check_same_policy(actor, actor)
    with pytest.raises(ConfigError) as caught:
        check_same_policy(actor, rollout)
    assert caught.value.key == f"rollout.model.{key}"
    if values is not None:
        assert caught.value.differing == {f"model.{key}": values}


@pytest.mark.parametrize(
    ("model", "changes", "parallel"),
    [
        ({}, {"transformer": {"apply_rope_fusion": True, "attention_backend": "unfused"}}, {}),
        ({}, {"transformer": {"recompute_granularity": "selective"}}, {}),
        ({}, {"dtype": "bfloat16", "seed": 5, "init_method_std": 0.5, "hidden_dropout": 0.1}, {}),
        ({}, {"max_sequence_length": 64, "train_only": ["*norm*weight"]}, {}),
        ({}, {"kv_channels": 8, "num_query_groups": 2}, {}),  # as Megatron derives them
        ({}, {"transformer": {"num_layers_in_first_pipeline_stage": 1}}, {"pp": 2}),
        (EXPERTS, {"transformer": {"moe_token_dispatcher_type": "flex", "moe_permute_fusion": True}}, {"ep": 2}),
        (EXPERTS, {"transformer": {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1}}, SEQUENCE),
        ({}, {"transformer": {"bias_activation_fusion": True}}, {}),
    ],
)
def test_field_that_changes_no_value_may_differ(
    model: dict[str, Any], changes: dict[str, Any], parallel: dict[str, int]
) -> None:
    check_same_policy(config_of(model, {}), config_of(model, changes, parallel=parallel))
