"""A GPT model of Megatron-Core on this rank: the chunks of it that the rank's stages hold."""

from __future__ import annotations

import functools
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from mcontroller.errors import ConfigError
from parallel_state.megatron import MegatronContext
from workers.config import ModelConfig, ParallelConfig
from workers.fit import check_local, padded_vocab_size
from workers.hf import load_hf
from workers.initialize import initialize_weights
from workers.local_modules import use_gated_mlps
from workers.local_spec import block_spec, chosen_implementation
from workers.placement import place_chunks
from workers.transformer_config import transformer_config
from workers.value_head import put_value_head
from workers.vocab_padding import mask_padded_vocabulary


class ModelProvider(Protocol):
    """A user's own model, one chunk at a time, as Megatron-LM's training scripts define it."""

    def __call__(self, pre_process: bool, post_process: bool, vp_stage: int | None) -> torch.nn.Module: ...


def build_model(
    model: ModelConfig,
    parallel: ParallelConfig,
    context: MegatronContext,
    *,
    value_head: bool = False,
    model_provider: ModelProvider | None = None,
    initialize: bool = True,
) -> list[torch.nn.Module]:
    """This rank's model chunks, on its device, in train mode: one, or ``parallel.vpp`` of them.

    Collective over the context's groups. The chunks are plain: without DistributedDataParallel, in ``model.dtype``.
    ``workers.placement.place_chunks`` says which tensors are moved and cast, of a user's own model too.

    Args:
        value_head: a critic: one number a token (float32 [batch, seq, 1]) in place of logits; embeddings are not tied.
        model_provider: builds each chunk instead of us; ``model`` is not looked at then, and its weights stay as
            the provider made them, moved to the device and cast to the dtype of the chunk's own Megatron config.
        initialize: False leaves weights to be loaded afterwards, whatever ``model.hf_path`` and ``model.seed`` say.

    Raises:
        DataError: the checkpoint at ``model.hf_path`` does not fit the model; with the names of its tensors.
        ConfigError: before the first collective: a model that the axes do not divide, axes that are not the
            context's, an unknown or ill-typed field, Transformer Engine asked for where it cannot run; a provider's
            chunk without a Megatron config, or with one that contradicts itself on the dtype.
    """
    _check_axes(parallel, context)
    if model_provider is None:
        model_provider = _OwnModel(model, parallel, context, value_head)
    with context.activate():
        chunks = [
            model_provider(pre_process=first, post_process=last, vp_stage=vp_stage)
            for first, last, vp_stage in _stages(parallel, context)
        ]
        if value_head and _is_last(parallel, context):
            put_value_head(chunks[-1], context.pg.tp)
        place_chunks(chunks, torch.device(torch.cuda.current_device()))
        if initialize and isinstance(model_provider, _OwnModel):
            left = None if model.hf_path is None else load_hf(chunks, model.hf_path, context)
            initialize_weights(chunks, context, model.seed, only=left)
    return chunks


def _check_axes(parallel: ParallelConfig, context: MegatronContext) -> None:
    layout = context.layout
    wanted = {"tp": parallel.tp, "pp": parallel.pp, "cp": parallel.cp, "ep": parallel.ep, "vpp": parallel.vpp}
    for axis, size in wanted.items():
        if getattr(layout, axis) != size:
            raise ConfigError(
                f"parallel.{axis} is {size}, but the context's layout has {axis}={getattr(layout, axis)}: build both "
                "from one ParallelConfig",
                key=f"parallel.{axis}",
                value=size,
            )


def _stages(parallel: ParallelConfig, context: MegatronContext) -> list[tuple[bool, bool, int | None]]:
    """For each chunk of this rank: whether it is the first of the model, whether the last, and its virtual stage."""
    pp_rank = context.pg.pp.rank()
    if parallel.vpp is None:
        return [(pp_rank == 0, _is_last(parallel, context), None)]
    return [
        (pp_rank == 0 and stage == 0, _is_last(parallel, context) and stage == parallel.vpp - 1, stage)
        for stage in range(parallel.vpp)
    ]


def _is_last(parallel: ParallelConfig, context: MegatronContext) -> bool:
    return context.pg.pp.rank() == parallel.pp - 1


@functools.cache
def _tell(choice: str) -> None:
    """On standard output, once a process: nobody sees a logger's info unless a program asks for it."""
    print(choice, flush=True)  # noqa: T201


class _OwnModel:
    """The provider of a model that a ModelConfig describes."""

    def __init__(
        self, model: ModelConfig, parallel: ParallelConfig, context: MegatronContext, value_head: bool
    ) -> None:
        self.model, self.parallel, self.context = model, parallel, context
        self.tied = model.tie_embeddings and not value_head
        self.config: TransformerConfig = transformer_config(model, parallel)
        self.implementation = chosen_implementation(model.transformer_impl)
        if self.implementation == "local":
            check_local(model, on_gpu=torch.cuda.is_available())
        if dist.get_rank() == 0:
            _tell(f"model.transformer_impl={model.transformer_impl}: layers of {self.implementation}")

    def __call__(self, pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTModel:
        model, context = self.model, self.context
        try:
            chunk = GPTModel(
                config=self.config,
                transformer_layer_spec=block_spec(self.config, self.implementation, context.pg.pp.rank(), vp_stage),
                vocab_size=padded_vocab_size(model.vocab_size, self.parallel.tp),
                max_sequence_length=model.max_sequence_length,
                pre_process=pre_process,
                post_process=post_process,
                share_embeddings_and_output_weights=self.tied,
                position_embedding_type=model.position_embedding_type,
                rotary_percent=model.rotary_percent,
                rotary_base=model.rotary_base,
                rope_scaling=model.rope_scaling_factor is not None,
                rope_scaling_factor=model.rope_scaling_factor or 1.0,
                pg_collection=context.pg,
                vp_stage=vp_stage,
            )
        except (AssertionError, ImportError) as error:
            raise ConfigError(f"megatron-core cannot build the model: {error}", key="model", value=model) from error
        if self.implementation == "local":
            use_gated_mlps(chunk)
        mask_padded_vocabulary(chunk, model.vocab_size)
        return chunk
