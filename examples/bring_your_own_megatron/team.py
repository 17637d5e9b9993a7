"""A team's own training code, as it was before there was a controller: arguments, model, optimizer, one step.

It knows ranks only through torch.distributed and Megatron's ``parallel_state``, as Megatron-LM's scripts do.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig


def parse_args(**changes: Any) -> argparse.Namespace:
    """Return the arguments, with the names of Megatron-LM's."""
    defaults = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "normalization": "LayerNorm",
        "add_bias_linear": False,
        "swiglu": False,
        "vocab_size": 64,
        "padded_vocab_size": 64,
        "seq_length": 16,
        "max_position_embeddings": 32,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "lr": 1e-2,
        "train_samples": 400,
        "seed": 1234,
    }
    return argparse.Namespace(**(defaults | changes))


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        attention_dropout=args.attention_dropout,
        hidden_dropout=args.hidden_dropout,
        normalization=args.normalization,
        add_bias_linear=args.add_bias_linear,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
    )


def model_provider(
    args: argparse.Namespace, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> GPTModel:
    return GPTModel(
        transformer_config(args),
        get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type=args.position_embedding_type,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        vp_stage=vp_stage,
    )


def setup_model_and_optimizer(args: argparse.Namespace) -> tuple[list[Any], Any, OptimizerParamScheduler]:
    torch.manual_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    first, last = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
    model = model_provider(args, first, last).to(torch.cuda.current_device())
    model.config.finalize_model_grads_func = finalize_model_grads
    wrapped = [DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=args.lr, min_lr=0.0, clip_grad=1.0), wrapped
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=args.train_samples,
        lr_decay_style="linear",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=args.train_samples,
        wd_incr_style="constant",
    )
    return wrapped, optimizer, scheduler


def forward_step(data_iterator: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(data_iterator)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(inputs.size(1)).expand_as(inputs)

    def loss_func(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = losses.float().mean()
        return loss, {"lm loss": loss.detach().clone()}  # the schedule divides the loss in place

    return model(inputs, positions, None, labels=labels), loss_func


def train_step(
    args: argparse.Namespace, tokens: torch.Tensor, model: Sequence[Any], optimizer: Any, scheduler: Any
) -> dict[str, float]:
    """Train on this rank's rows, int64 ``[rows, seq + 1]``; the losses are known on the last stage."""
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    micro_batches = tokens.split(args.micro_batch_size)
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micro_batches),
        model=list(model),
        num_microbatches=len(micro_batches),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )
    _, grad_norm, _ = optimizer.step()
    scheduler.step(increment=args.global_batch_size)
    report = {"grad norm": float(grad_norm), "learning rate": float(optimizer.param_groups[0]["lr"])}
    if mpu.is_pipeline_last_stage():
        loss = torch.stack([each["lm loss"] for each in losses]).mean()
        torch.distributed.all_reduce(loss, torch.distributed.ReduceOp.AVG, mpu.get_data_parallel_group())
        report["lm loss"] = float(loss)
    return report


def pretrain(args: argparse.Namespace, data: torch.Tensor) -> list[dict[str, float]]:
    """The loop without a controller, on every rank: each takes the rows of its data-parallel rank."""
    model, optimizer, scheduler = setup_model_and_optimizer(args)
    rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    return [
        train_step(args, batch.chunk(size)[rank], model, optimizer, scheduler)
        for batch in data.split(args.global_batch_size)
    ]
