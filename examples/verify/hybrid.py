"""The GPT as a HybridModel, of megatron-core 0.19 and later, as `python -m mcontroller verify` verifies it."""

import dataclasses
from unittest import mock

import gpt
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_model import HybridModel

from workers.model.hybrid import local_stack_spec
from workers.model.local_modules import TENorm

LAYERS = "*-" * 4  # attention and an MLP


def config(**parallel):
    made = gpt.config(**parallel, is_hybrid_model=True)
    made.num_layers = len(LAYERS)
    return made


def model_provider(config, pre_process, post_process, vp_stage=None):
    stages = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    size = len(LAYERS) // stages
    pattern = "|".join(LAYERS[start : start + size] for start in range(0, len(LAYERS), size))
    with mock.patch.object(hybrid_block, "TENorm", TENorm):  # the norm of a stack is Transformer Engine's
        return HybridModel(
            config, local_stack_spec(config), gpt.VOCABULARY, gpt.LENGTH, hybrid_layer_pattern=pattern,
            pre_process=pre_process, post_process=post_process, share_embeddings_and_output_weights=True,
            position_embedding_type="rope", vp_stage=vp_stage,
        )  # fmt: skip


program = dataclasses.replace(gpt.program, config=config, model_provider=model_provider)
