"""HybridModels, of megatron-core 0.19 and later, as `python -m mcontroller verify` verifies them."""

import dataclasses
from functools import partial
from unittest import mock

import gpt
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_model import HybridModel

from workers.model.hybrid import local_stack_spec
from workers.model.local_modules import TENorm


def make_config(layers, fields, **parallel):
    config = gpt.config(**fields, **parallel, is_hybrid_model=True)
    config.num_layers = len(layers)
    return config


def model_provider(layers, config, pre_process, post_process, vp_stage=None):
    stages = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    size = len(layers) // stages
    pattern = "|".join(layers[start : start + size] for start in range(0, len(layers), size))
    with mock.patch.object(hybrid_block, "TENorm", TENorm):  # the norm of a stack is Transformer Engine's
        return HybridModel(
            config, local_stack_spec(config, pattern), gpt.VOCABULARY, gpt.LENGTH, hybrid_layer_pattern=pattern,
            pre_process=pre_process, post_process=post_process, share_embeddings_and_output_weights=True,
            position_embedding_type="rope", vp_stage=vp_stage,
        )  # fmt: skip


def hybrid(layers, **fields):
    return dataclasses.replace(
        gpt.program, config=partial(make_config, layers, fields), model_provider=partial(model_provider, layers)
    )


program = hybrid("*-" * 4)  # attention and an MLP: the GPT
mamba = hybrid("M-*-" * 2, mamba_num_heads=8, mamba_head_dim=8, mamba_state_dim=8, mamba_num_groups=4)
delta_net = hybrid(
    "G-*-" * 2, deterministic_mode=True, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=8,
    linear_value_head_dim=8,
)  # fmt: skip
