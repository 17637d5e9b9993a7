"""Numbers of parameters of each rank, from the configuration of the model and its axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer import TransformerConfig

from mcontroller.errors import ConfigError
from workers.config import ModelConfig, ParallelConfig
from workers.config.fit import padded_vocab_size
from workers.model.local_spec import expert_layers, layers_of_stage
from workers.model.transformer_config import transformer_config

__all__ = ["Parameters", "Shape", "count_parameters", "layers_of_chunks"]

# Fields of model.transformer that add parameters which are not counted, and the values without an effect.
_NOT_COUNTED = {
    "mtp_num_layers": (None, 0),
    "attention_output_gate": (False,),
    "moe_latent_size": (None,),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
}


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters of one rank.

    Attributes:
        dense: parameters that are replicated over the dp and cp axes.
        expert: parameters of experts, which are replicated over the edp axis.
    """

    dense: int = 0
    expert: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.dense + other.dense, self.expert + other.expert)


class Shape:
    """Widths of a model on one rank, after the axes have divided them.

    Args:
        model: the model.
        parallel: its axes.

    Attributes:
        config: Megatron's TransformerConfig.
        hidden: width of the hidden states.
        queries, keys: channels of the queries, and of the keys (as many as of the values).
        mlp, expert_mlp, shared_mlp: width inside the MLP, inside an expert, and inside the shared expert (0 if none).
        gates: 2 if the first linear layer of an MLP has a gate as well, else 1.
        experts: experts of the rank in a layer with experts.
        vocabulary: entries of the vocabulary of the rank.

    Raises:
        ConfigError: the model has parts whose parameters are not counted; the error names the field.
    """

    def __init__(self, model: ModelConfig, parallel: ParallelConfig) -> None:
        config: TransformerConfig = transformer_config(model, parallel)
        for name, neutral in _NOT_COUNTED.items():
            if getattr(config, name, neutral[0]) not in neutral:
                raise ConfigError(
                    f"memory cannot be estimated with model.transformer.{name}={getattr(config, name)!r}: its "
                    f"parameters are not counted; expected {neutral[0]!r}",
                    key=f"model.transformer.{name}",
                    value=getattr(config, name),
                )
        etp = parallel.tp if parallel.etp is None else parallel.etp
        width = config.kv_channels
        self.config = config
        self.hidden = config.hidden_size
        self.queries = config.num_attention_heads * width // parallel.tp
        self.keys = config.num_query_groups * width // parallel.tp
        self.mlp = config.ffn_hidden_size // parallel.tp
        self.expert_mlp = (config.moe_ffn_hidden_size or config.ffn_hidden_size) // etp
        self.shared_mlp = (config.moe_shared_expert_intermediate_size or 0) // parallel.tp
        self.gates = 2 if config.gated_linear_unit else 1
        self.experts = (config.num_moe_experts or 0) // parallel.ep
        self.vocabulary = padded_vocab_size(model.vocab_size, parallel.tp) // parallel.tp


def layers_of_chunks(model: ModelConfig, parallel: ParallelConfig, pp_rank: int) -> list[list[bool]]:
    """Return for every chunk of a pipeline stage, and for each of its layers, whether the layer has experts."""
    config = transformer_config(model, parallel)
    with_experts = expert_layers(config)
    stages: Sequence[int | None] = [None] if parallel.vpp is None else range(parallel.vpp)
    return [[with_experts[layer] for layer in layers_of_stage(config, pp_rank, stage)] for stage in stages]


def count_parameters(
    model: ModelConfig, parallel: ParallelConfig, pp_rank: int, *, value_head: bool = False
) -> Parameters:
    """Return the numbers of parameters of a rank on one stage of the pipeline; all ranks of a stage have the same.

    Args:
        model: the model.
        parallel: its axes.
        pp_rank: the stage.
        value_head: whether the model ends in a value head instead of an output layer.

    Raises:
        ConfigError: as ``Shape``.
    """
    shape = Shape(model, parallel)
    total = Parameters()
    for chunk in layers_of_chunks(model, parallel, pp_rank):
        for with_experts in chunk:
            total += _of_layer(shape, with_experts)
    return total + Parameters(_of_ends(shape, model, parallel, pp_rank, value_head))


def _of_ends(shape: Shape, model: ModelConfig, parallel: ParallelConfig, pp_rank: int, value_head: bool) -> int:
    """Parameters in front of the layers of a stage and after them."""
    embedding = shape.vocabulary * shape.hidden
    first, last = pp_rank == 0, pp_rank == parallel.pp - 1
    tied = model.tie_embeddings and not value_head
    count = 0
    if first:
        count += embedding
        if model.position_embedding_type == "learned_absolute":
            count += model.max_sequence_length * shape.hidden
    if last:
        count += _norm(shape, shape.hidden)
        if value_head:
            count += shape.hidden
        elif not (tied and first):  # a tied embedding has a copy on the last stage
            count += embedding
    return count


def _of_layer(shape: Shape, with_experts: bool) -> Parameters:
    config, hidden = shape.config, shape.hidden
    dense = 2 * _norm(shape, hidden)
    dense += _latent_attention(shape) if config.multi_latent_attention else _attention(shape)
    if not with_experts:
        return Parameters(dense + _mlp(shape, shape.mlp, config.add_bias_linear))
    dense += config.hidden_size * config.num_moe_experts
    if shape.shared_mlp:
        dense += _mlp(shape, shape.shared_mlp, config.add_bias_linear)
        dense += hidden if getattr(config, "moe_shared_expert_gate", False) else 0
    return Parameters(dense, shape.experts * _mlp(shape, shape.expert_mlp, False))


def _attention(shape: Shape) -> int:
    config, hidden, mixed = shape.config, shape.hidden, shape.queries + 2 * shape.keys
    count = mixed * hidden + shape.queries * hidden
    if config.add_bias_linear or config.add_qkv_bias:
        count += mixed
    if config.add_bias_linear:
        count += hidden
    return count + (2 * _norm(shape, config.kv_channels) if config.qk_layernorm else 0)


def _latent_attention(shape: Shape) -> int:
    """Parameters of multi-latent attention, whose down-projections every tensor-parallel rank has whole."""
    config: Any = shape.config
    heads = shape.queries // config.kv_channels
    rank, latent, rotary = config.q_lora_rank, config.kv_lora_rank, config.qk_pos_emb_head_dim
    normed = [latent] if rank is None else [latent, rank]
    count = (latent + rotary) * shape.hidden + heads * (config.qk_head_dim + config.v_head_dim) * latent
    count += shape.queries * shape.hidden if rank is None else rank * (shape.hidden + shape.queries)
    return count + heads * config.v_head_dim * shape.hidden + sum(_norm(shape, width) for width in normed)


def _mlp(shape: Shape, width: int, biases: bool) -> int:
    count = (shape.gates + 1) * width * shape.hidden
    return count + (shape.gates * width + shape.hidden if biases else 0)


def _norm(shape: Shape, width: int) -> int:
    return 2 * width if shape.config.normalization == "LayerNorm" else width
