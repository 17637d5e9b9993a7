"""Freeze the weights of a model that are not trained, and give it the adapters of its configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from mcontroller.errors import ConfigError
from parallel_state.megatron import MegatronContext
from parallel_state.releases import language_models
from workers.config.model import ModelConfig
from workers.config.trained_weights import adapter_target, check_not_overlapped, linear_names, trains
from workers.lora.adapters import Adapter, Adapters
from workers.lora.peft_files import load_adapter
from workers.weights.hf.names import rows_of_pieces, weight_names
from workers.weights.shards import named_shards


def choose_trained_weights(
    chunks: Sequence[nn.Module], model: ModelConfig, context: MegatronContext, *, value_head: bool = False
) -> None:
    """Freeze the weights that ``model`` says, and add new adapters if it has ``lora``; call it when weights are loaded.

    A value head is always trained: it has no weights to start from.

    Args:
        chunks: this rank's model chunks, without DistributedDataParallel.
        model: its ``lora``, ``freeze`` and ``train_only``.
        context: the layout of the chunks.
        value_head: whether the model ends in a value head.

    Raises:
        ConfigError: the adapters cannot be added to a layer.
        DataError: the adapter at ``model.lora.path`` does not fit the model.
    """
    if model.lora is None and not model.freeze and not model.train_only:
        return
    names_of = weight_names(chunks)
    for shard in named_shards(chunks, context):
        head = value_head and shard.part.name.startswith("output_layer.")
        shard.param.requires_grad_(head or trains(model, shard.part.name, names_of(shard.part.name)))
    for chunk in chunks:
        if model.lora is not None:
            _add_adapters(chunk, model, context, names_of)
        _start_backward_pass(chunk)
    if model.lora is not None and model.lora.path is not None:
        load_adapter(chunks, model)


def _add_adapters(
    chunk: Any, model: ModelConfig, context: MegatronContext, names_of: Callable[[str], tuple[str, ...]]
) -> None:
    config, lora = chunk.config, model.lora
    assert lora is not None
    adapters = Adapters(lora.dropout)
    for position, block in enumerate(chunk.decoder.layers):
        for inside, layer in block.named_modules():
            if not inside.rpartition(".")[2].startswith("linear_") and not type(layer).__name__.endswith("Linear"):
                continue
            name = f"decoder.layers.{block.layer_number - 1}.{inside}"
            experts = hasattr(layer, "num_gemms")
            weight = f"{name}.weight0" if experts else f"{name}.weight"
            hf_names = linear_names(names_of(weight))
            gated = config.gated_linear_unit or not name.endswith(".linear_fc1")
            target = adapter_target(lora, name, hf_names if gated else [])
            if target is None:
                continue
            _check_layer(layer, name, config)
            rows = len(layer.weight0 if experts else layer.weight)
            heights = rows_of_pieces(rows, len(target.pieces), config)
            adapters.add(
                Adapter(target, layer, heights, lora, config, context.pg), layer, f"decoder.layers.{position}.{inside}"
            )
    for adapter in adapters:
        adapter.initialize(model.seed)
    chunk.lora = adapters.train(chunk.training)


def _check_layer(layer: Any, name: str, config: Any) -> None:
    """Raise ConfigError for a linear layer that does not compute as the adapter expects."""
    if getattr(config, "moe_shared_expert_overlap", False):
        check_not_overlapped(name)
    gated = name.endswith(".linear_qkv") and getattr(config, "attention_output_gate", False)
    if gated or ".local_experts." in name or getattr(layer, "gather_output", False) or getattr(layer, "expert", False):
        raise ConfigError(
            f"model.lora: {name} is a layer that adapters are not computed for ({type(layer).__name__}, a single "
            "expert's, with gathered output, or with a gate of attention): exclude it with model.lora.exclude",
            key="model.lora.exclude",
            value=name,
        )


def _start_backward_pass(chunk: Any) -> None:
    """Let the embedding's output need a gradient if the pass must reach further than the trained weights do.

    A recomputed layer has no backward pass unless an input needs a gradient, and a stage of a pipeline must have one.
    """
    config, embedding = chunk.config, getattr(chunk, "embedding", None)
    if not isinstance(chunk, language_models()) or embedding is None or not chunk.pre_process:
        return
    if config.recompute_granularity is None and config.pipeline_model_parallel_size == 1:
        return

    def hook(module: Any, inputs: Any, output: torch.Tensor) -> None:
        if torch.is_grad_enabled() and not output.requires_grad:
            output.requires_grad_()

    embedding.register_forward_hook(hook)
