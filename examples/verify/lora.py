"""The GPT of `gpt.py` with adapters, whose B starts from random numbers, so that every factor has a gradient."""

import contextlib
import dataclasses
from types import SimpleNamespace

import gpt
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from workers.config import LoraConfig, ModelConfig
from workers.lora.attach import choose_trained_weights

MODEL = ModelConfig(
    vocab_size=gpt.VOCABULARY, max_sequence_length=gpt.LENGTH, num_layers=4, hidden_size=32, num_attention_heads=4,
    lora=LoraConfig(rank=2, alpha=4.0, exclude=["layers.1.*.k_proj"]),
)  # fmt: skip


def model_provider(config, pre_process, post_process, vp_stage=None):
    chunk = gpt.model_provider(config, pre_process, post_process, vp_stage)
    context = SimpleNamespace(pg=ProcessGroupCollection.use_mpu_process_groups())
    choose_trained_weights([chunk], MODEL, context)
    for adapter in chunk.lora:
        for name, factor in adapter.named_parameters():
            divided = adapter.divided == name[0]
            with get_cuda_rng_tracker().fork() if divided else contextlib.nullcontext():
                if name[0] == "B":
                    torch.nn.init.normal_(factor, std=0.3)
    return chunk


program = dataclasses.replace(gpt.program, model_provider=model_provider)
