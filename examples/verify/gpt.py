"""A GPT as `python -m mcontroller verify examples/verify/gpt.py:program` verifies it."""

from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from parallel_state.verify import Program
from workers.model.local_spec import block_spec
from workers.zigzag import zigzag_positions

VOCABULARY, LENGTH = 64, 16


def config(**parallel):
    return TransformerConfig(
        num_layers=4, hidden_size=32, num_attention_heads=4, num_query_groups=4, ffn_hidden_size=64,
        normalization="RMSNorm", add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, hidden_dropout=0.0, attention_dropout=0.0,
        calculate_per_token_loss=True, **parallel,
    )  # fmt: skip


def model_provider(config, pre_process, post_process, vp_stage=None):
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return GPTModel(
        config, block_spec(config, "local", stage, vp_stage), VOCABULARY, LENGTH, pre_process=pre_process,
        post_process=post_process, share_embeddings_and_output_weights=True, position_embedding_type="rope",
        vp_stage=vp_stage,
    )  # fmt: skip


def whole_batch(index):
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(VOCABULARY, (1, LENGTH + 1), generator=generator)
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": (torch.rand(1, LENGTH, generator=generator) < 0.7).float(),
        "position_ids": torch.arange(LENGTH)[None],
    }


def own_positions():
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    return zigzag_positions(LENGTH, size, rank)  # of two pieces


def batch(index):
    return {name: value.index_select(1, own_positions()) for name, value in whole_batch(index).items()}


def loss(mask, losses):
    total, tokens = (losses.float() * mask).sum(), mask.sum().int()
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


def forward_step(data_iterator, model):
    data = next(data_iterator)
    output = model(data["tokens"], data["position_ids"], None, labels=data["labels"])
    return output, partial(loss, data["loss_mask"])


program = Program(config, model_provider, forward_step, batch, seq_length=LENGTH)
