"""Build this rank's chunks of a GPT model of Megatron-Core, as a GPTModel or as a HybridModel."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from mcontroller.errors import ConfigError
from parallel_state.cpu import device
from parallel_state.dry_run import transformer_engine
from parallel_state.megatron import MegatronContext
from parallel_state.releases import language_models
from workers.config import ModelConfig, ParallelConfig
from workers.config.fit import check_local, padded_vocab_size
from workers.distinct_tokens import attend_over_rows
from workers.lora.attach import choose_trained_weights
from workers.model.bridge import BridgeModel
from workers.model.gpu_defaults import chosen_implementation, gpu_defaults
from workers.model.initialize import initialize_weights
from workers.model.local_modules import use_gated_mlps
from workers.model.local_spec import block_spec
from workers.model.placement import place_chunks
from workers.model.token_prediction import add_prediction_layers, finish_prediction_layers
from workers.model.transformer_config import transformer_config
from workers.model.value_head import put_value_head
from workers.weights.hf.model import load_hf
from workers.weights.hf.verify_load import verify_load

_LATENT_EPSILON = 1e-6
# Far below any logit at any temperature, but finite: a probability of 0 times -inf would make an entropy NaN.
_IMPOSSIBLE = -3.0e4


class ModelProvider(Protocol):
    """A function that builds a user-defined model, one chunk at a time, as in Megatron-LM's training scripts.

    If it has a parameter ``pg_collection`` too, it gets Megatron's process groups of the layout, for the constructors
    that it calls.
    """

    def __call__(self, pre_process: bool, post_process: bool, vp_stage: int | None) -> torch.nn.Module:
        """Return one chunk.

        Args:
            pre_process: whether the chunk is the first of the model.
            post_process: whether it is the last.
            vp_stage: its virtual stage on this rank, counted from 0; None without virtual stages.
        """
        ...


def build_model(
    model: ModelConfig,
    parallel: ParallelConfig,
    context: MegatronContext,
    *,
    value_head: bool = False,
    model_provider: ModelProvider | None = None,
    initialize: bool = True,
) -> list[torch.nn.Module]:
    """Return this rank's model chunks, on its device, in train mode: one, or ``parallel.vpp`` of them.

    Collective over the context's groups. The chunks are in ``model.dtype`` and without DistributedDataParallel.
    ``workers.model.placement.place_chunks`` describes which tensors are moved and cast, also of user-defined models.

    Args:
        model: the model; its weights are read from ``model.hf_path``, or follow from ``model.seed``.
        parallel: the axes of ``context``.
        context: the layout that the model is built in.
        value_head: whether the model ends in a value head, as a critic does: one number for each token (float32
            ``[batch, seq, 1]``) instead of logits. Embeddings are not tied then.
        model_provider: a function that builds each chunk. Of ``model`` only ``vocab_size`` is used then: if the
            chunk's vocabulary is larger, the rest is padding, which is never sampled and not saved. The weights are the
            provider's, moved to the device and cast to the dtype of the chunk's own Megatron config.
        initialize: False leaves the weights uninitialized, to be loaded later, and ignores ``model.hf_path`` and
            ``model.seed``.

    Raises:
        DataError: the checkpoint at ``model.hf_path`` does not fit the model, with the names of its tensors; or the
            model computes something else than transformers (``model.verify_load``), with the name of the layer.
        ConfigError: before the first collective: the axes do not divide the model; a field is unknown or of a wrong
            type; Transformer Engine is requested and cannot run. Also if Megatron cannot build the model, or a
            provider's chunk has no Megatron config or one whose flags contradict its dtype.
    """
    if model_provider is None:
        built_by = BridgeModel if model.provider == "bridge" else _OwnModel
        model_provider = built_by(model, parallel, context, value_head)
    build_chunk = _with_groups(model_provider, context.pg)
    with context.activate():
        chunks = [
            build_chunk(pre_process=first, post_process=last, vp_stage=vp_stage)
            for first, last, vp_stage in _stages(parallel, context)
        ]
        for chunk in chunks:
            _mask_padding(chunk, model.vocab_size)
        if value_head and _is_last(parallel, context):
            put_value_head(chunks[-1], context.pg.tp)
        place_chunks(chunks, torch.device(torch.cuda.current_device()))
        if initialize and isinstance(model_provider, _OwnModel | BridgeModel):
            left = None if model.hf_path is None else load_hf(chunks, model.hf_path, context)
            initialize_weights(chunks, context, model.seed, only=left)
            if model.hf_path is not None and model.verify_load != "off":
                verified = verify_load(chunks, model, context)
                if dist.get_rank() == 0:
                    _print_once(verified)
        choose_trained_weights(chunks, model, context, value_head=value_head)
        for chunk in chunks:
            finish_prediction_layers(chunk, model)
    return chunks


def _mask_padding(chunk: Any, vocab_size: int) -> None:
    """Set the probability of entries from ``vocab_size`` on to 0, in logits that are gathered over tp or not.

    A chunk of a GPTModel or HybridModel gets the attribute ``unpadded_vocab_size``; one that has it stays as it is.
    """
    padded = isinstance(chunk, language_models()) and chunk.vocab_size >= vocab_size
    if not padded or hasattr(chunk, "unpadded_vocab_size"):
        return
    chunk.unpadded_vocab_size = vocab_size
    if not chunk.post_process or chunk.vocab_size == vocab_size:
        return
    tp_rank = chunk.pg_collection.tp.rank()

    def mask(layer: torch.nn.Module, args: Any, output: tuple[torch.Tensor, Any]) -> None:
        logits = output[0]
        width = logits.size(-1)
        first = 0 if width == chunk.vocab_size else tp_rank * width
        real = min(max(vocab_size - first, 0), width)
        logits.narrow(-1, real, width - real).fill_(_IMPOSSIBLE)

    chunk.output_layer.register_forward_hook(mask)


def _with_groups(
    provider: Callable[..., torch.nn.Module], pg: ProcessGroupCollection
) -> Callable[..., torch.nn.Module]:
    """Return the provider with the process groups bound to its parameter ``pg_collection``, if it has one."""
    accepts = "pg_collection" in inspect.signature(provider).parameters
    return functools.partial(provider, pg_collection=pg) if accepts else provider


def _stages(parallel: ParallelConfig, context: MegatronContext) -> list[tuple[bool, bool, int | None]]:
    """For each chunk of this rank: whether it is the first of the model, whether it is the last, its virtual stage."""
    pp_rank = context.pg.pp.rank()
    if parallel.vpp is None:
        return [(pp_rank == 0, _is_last(parallel, context), None)]
    return [
        (pp_rank == 0 and stage == 0, _is_last(parallel, context) and stage == parallel.vpp - 1, stage)
        for stage in range(parallel.vpp)
    ]


def _is_last(parallel: ParallelConfig, context: MegatronContext) -> bool:
    return context.pg.pp.rank() == parallel.pp - 1


def _set_latent_epsilon(chunk: torch.nn.Module) -> None:
    """Set the epsilon of the norms of compressed queries, keys and values, which no config.json has a key for."""
    for name, module in chunk.named_modules():
        if name.endswith((".linear_q_up_proj", ".linear_kv_up_proj")) and hasattr(module, "layer_norm_weight"):
            module.eps = _LATENT_EPSILON


@functools.cache
def _print_once(choice: str) -> None:
    """Print once in a process. A logger's info is not visible unless a program configures logging."""
    print(choice, flush=True)  # noqa: T201


class _OwnModel:
    """The provider of a model that a ModelConfig describes."""

    def __init__(
        self, model: ModelConfig, parallel: ParallelConfig, context: MegatronContext, value_head: bool
    ) -> None:
        self.model, self.parallel, self.context = model, parallel, context
        if value_head and model.prediction_layers:
            raise ConfigError(
                f"model.transformer.mtp_num_layers is {model.prediction_layers}, but a model with a value head "
                "predicts no tokens: leave it out for this role",
                key="model.transformer.mtp_num_layers",
                value=model.prediction_layers,
            )
        self.tied = model.tie_embeddings and not value_head
        self.config: TransformerConfig = transformer_config(model, parallel)
        self.implementation = chosen_implementation(model.transformer_impl)
        if self.implementation == "local":
            check_local(model, on_gpu=torch.cuda.is_available(), counted=transformer_engine.counted_fields())
        if dist.get_rank() == 0 and device.current.has_memory:  # a dry run's report names the layers
            _print_once(f"model.transformer_impl={model.transformer_impl}: layers of {self.implementation}")
            for field, value in gpu_defaults(model).items():
                _print_once(f"model.transformer.{field}={value}")

    def __call__(self, pre_process: bool, post_process: bool, vp_stage: int | None) -> torch.nn.Module:
        model, context = self.model, self.context
        spec = block_spec(self.config, self.implementation, context.pg.pp.rank(), vp_stage)
        try:
            chunk = self._model(
                spec,
                vocab_size=padded_vocab_size(model.vocab_size, self.parallel.tp),
                max_sequence_length=model.max_sequence_length,
                pre_process=pre_process,
                post_process=post_process,
                share_embeddings_and_output_weights=self.tied,
                position_embedding_type=model.position_embedding_type,
                rotary_percent=model.rotary_percent,
                rotary_base=model.rotary_base,
                vp_stage=vp_stage,
            )
        except (AssertionError, ImportError, ValueError) as error:
            raise ConfigError(f"megatron-core cannot build the model: {error}", key="model", value=model) from error
        add_prediction_layers(chunk, model, spec, self.implementation, context.pg)
        if self.implementation == "local":
            use_gated_mlps(chunk)
        _set_latent_epsilon(chunk)
        attend_over_rows(chunk)
        chunk.model_family = model.family  # read by workers.weights.hf
        return chunk

    def _model(self, spec: TransformerBlockSubmodules, **arguments: Any) -> Any:
        factor = self.model.rope_scaling_factor
        if self.model.hybrid_layer_pattern is not None:
            # Older releases of megatron-core have no HybridModel.
            from workers.model.hybrid import build_hybrid, build_with_states

            if self.model.has_states:
                letters = self.model.hybrid_layer_pattern.replace("|", "")
                return build_with_states(self.config, letters, self.implementation, self.context.pg, **arguments)
            return build_hybrid(self.config, spec, self.context.pg, rope_scaling_factor=factor, **arguments)
        return GPTModel(
            config=self.config,
            transformer_layer_spec=spec,
            rope_scaling=factor is not None,
            rope_scaling_factor=factor or 1.0,
            pg_collection=self.context.pg,
            **arguments,
        )
