"""The GPT with multi-latent attention, as `python -m mcontroller verify` verifies it."""

import dataclasses

import gpt
import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig


def config(**parallel):
    return MLATransformerConfig(
        num_layers=4, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, q_lora_rank=16, kv_lora_rank=16,
        qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8, qk_layernorm=True, rope_type="rope",
        normalization="RMSNorm", add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, hidden_dropout=0.0, attention_dropout=0.0,
        calculate_per_token_loss=True, **parallel,
    )  # fmt: skip


program = dataclasses.replace(gpt.program, config=config)
