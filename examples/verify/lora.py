"""The GPT of `gpt.py` with adapters, every factor of which starts from random numbers."""

from types import SimpleNamespace

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from examples.verify import gpt
from mcontroller.verify import Program
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
    for factor in chunk.lora.parameters():
        torch.nn.init.normal_(factor, std=0.3)
    return chunk


program = Program(gpt.config, model_provider, gpt.forward_step, gpt.batch, seq_length=gpt.LENGTH)
