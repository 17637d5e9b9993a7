"""Numbers of parameters of each rank, from the configuration of the model and its axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from mcontroller.errors import ConfigError
from workers.config import ModelConfig, ParallelConfig
from workers.config.fit import padded_vocab_size
from workers.config.lora import LoraConfig
from workers.config.trained_weights import adapter_target, model_family_of, trains
from workers.model.local_spec import expert_layers, layers_of_stage
from workers.model.transformer_config import transformer_config
from workers.weights.hf.family import hf_names_of

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
        cached: channels that generation caches for a position.
        mlp, expert_mlp, shared_mlp: width inside the MLP, inside an expert, and inside the shared expert (0 if none).
        gates: 2 if the first linear layer of an MLP has a gate as well, else 1.
        etp: ranks that an expert is divided over.
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
        self.etp = parallel.tp if parallel.etp is None else parallel.etp
        width = config.kv_channels
        self.config = config
        self.hidden = config.hidden_size
        self.queries = config.num_attention_heads * width // parallel.tp
        self.keys = config.num_query_groups * width // parallel.tp
        self.cached = 2 * self.keys
        if isinstance(config, MLATransformerConfig):
            self.cached = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.mlp = config.ffn_hidden_size // parallel.tp
        self.expert_mlp = (config.moe_ffn_hidden_size or config.ffn_hidden_size) // self.etp
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


@dataclass(frozen=True)
class _Weight:
    """A weight of a rank, or one of each of its ``experts`` if that is not 0."""

    name: str
    rows: int
    columns: int = 1
    experts: int = 0

    def times(self, count: int) -> Parameters:
        return Parameters(0, count * self.experts) if self.experts else Parameters(count)


def count_parameters(
    model: ModelConfig, parallel: ParallelConfig, pp_rank: int, *, value_head: bool = False, trained: bool = False
) -> Parameters:
    """Return the numbers of parameters of a rank on one stage of the pipeline; all ranks of a stage have the same.

    Args:
        model: the model.
        parallel: its axes.
        pp_rank: the stage.
        value_head: whether the model ends in a value head instead of an output layer.
        trained: whether only the trained parameters are counted, which have gradients and optimizer state.

    Raises:
        ConfigError: as ``Shape``.
    """
    shape = Shape(model, parallel)
    family = model_family_of(model)
    total = Parameters()
    for weight in _weights_of_stage(shape, model, parallel, pp_rank, value_head):
        hf_names = hf_names_of(family, f"{weight.name}0" if weight.experts else weight.name)
        head = value_head and weight.name.startswith("output_layer.")
        if not trained or head or trains(model, weight.name, hf_names):
            total += weight.times(weight.rows * weight.columns)
        if model.lora is not None and ".linear_" in weight.name and weight.name.endswith(".weight"):
            total += weight.times(_of_adapter(shape, model.lora, weight, hf_names))
    return total


def _weights_of_stage(
    shape: Shape, model: ModelConfig, parallel: ParallelConfig, pp_rank: int, value_head: bool
) -> Iterator[_Weight]:
    first, last = pp_rank == 0, pp_rank == parallel.pp - 1
    tied = model.tie_embeddings and not value_head
    embedding = _Weight("embedding.word_embeddings.weight", shape.vocabulary, shape.hidden)
    if first:
        yield embedding
        if model.position_embedding_type == "learned_absolute":
            yield _Weight("embedding.position_embeddings.weight", model.max_sequence_length, shape.hidden)
    with_experts = expert_layers(shape.config)
    stages: Sequence[int | None] = [None] if parallel.vpp is None else range(parallel.vpp)
    for stage in stages:
        for layer in layers_of_stage(shape.config, pp_rank, stage):
            for weight in _weights_of_layer(shape, bool(with_experts[layer])):
                yield replace(weight, name=f"decoder.layers.{layer}.{weight.name}")
    if last:
        yield _Weight("decoder.final_layernorm.weight", _norm(shape, shape.hidden))
        if value_head:
            yield _Weight("output_layer.weight", 1, shape.hidden)
        elif not (tied and first):  # a tied embedding has a copy on the last stage
            yield embedding if tied else replace(embedding, name="output_layer.weight")


def _weights_of_layer(shape: Shape, with_experts: bool) -> Iterator[_Weight]:
    """The weights of a layer; a norm and a bias are one with the weight of the same name."""
    config, hidden = shape.config, shape.hidden
    yield from _latent_attention(shape) if config.multi_latent_attention else _attention(shape)
    if not with_experts:
        yield _Weight("mlp.linear_fc1.layer_norm_weight", _norm(shape, hidden))
        yield from _mlp(shape, "mlp", shape.mlp, config.add_bias_linear)
        return
    yield _Weight("pre_mlp_layernorm.weight", _norm(shape, hidden))
    yield _Weight("mlp.router.weight", config.num_moe_experts, hidden)
    if shape.shared_mlp:
        yield from _mlp(shape, "mlp.shared_experts", shape.shared_mlp, config.add_bias_linear)
        if getattr(config, "moe_shared_expert_gate", False):
            yield _Weight("mlp.shared_experts.gate_weight", hidden)
    for weight in _mlp(shape, "mlp.experts", shape.expert_mlp, False):
        yield replace(weight, experts=shape.experts)


def _attention(shape: Shape) -> Iterator[_Weight]:
    config, hidden, mixed = shape.config, shape.hidden, shape.queries + 2 * shape.keys
    yield _Weight("self_attention.linear_qkv.layer_norm_weight", _norm(shape, hidden))
    yield _Weight("self_attention.linear_qkv.weight", mixed, hidden)
    yield _Weight("self_attention.linear_proj.weight", hidden, shape.queries)
    if config.add_bias_linear or config.add_qkv_bias:
        yield _Weight("self_attention.linear_qkv.bias", mixed)
    if config.add_bias_linear:
        yield _Weight("self_attention.linear_proj.bias", hidden)
    if config.qk_layernorm:
        yield _Weight("self_attention.q_layernorm.weight", _norm(shape, config.kv_channels))
        yield _Weight("self_attention.k_layernorm.weight", _norm(shape, config.kv_channels))


def _latent_attention(shape: Shape) -> Iterator[_Weight]:
    """The weights of multi-latent attention, whose down-projections every tensor-parallel rank has whole."""
    config: Any = shape.config
    hidden, heads = shape.hidden, shape.queries // config.kv_channels
    rank, latent = config.q_lora_rank, config.kv_lora_rank
    yield _Weight("input_layernorm.weight", _norm(shape, hidden))
    if rank is None:
        yield _Weight("self_attention.linear_q_proj.weight", shape.queries, hidden)
    else:
        yield _Weight("self_attention.linear_q_down_proj.weight", rank, hidden)
        yield _Weight("self_attention.linear_q_up_proj.layer_norm_weight", _norm(shape, rank))
        yield _Weight("self_attention.linear_q_up_proj.weight", shape.queries, rank)
    yield _Weight("self_attention.linear_kv_down_proj.weight", latent + config.qk_pos_emb_head_dim, hidden)
    yield _Weight("self_attention.linear_kv_up_proj.layer_norm_weight", _norm(shape, latent))
    yield _Weight("self_attention.linear_kv_up_proj.weight", heads * (config.qk_head_dim + config.v_head_dim), latent)
    yield _Weight("self_attention.linear_proj.weight", hidden, heads * config.v_head_dim)


def _mlp(shape: Shape, name: str, width: int, biases: bool) -> Iterator[_Weight]:
    yield _Weight(f"{name}.linear_fc1.weight", shape.gates * width, shape.hidden)
    yield _Weight(f"{name}.linear_fc2.weight", shape.hidden, width)
    if biases:
        yield _Weight(f"{name}.linear_fc1.bias", shape.gates * width)
        yield _Weight(f"{name}.linear_fc2.bias", shape.hidden)


def _of_adapter(shape: Shape, lora: LoraConfig, weight: _Weight, hf_names: Sequence[str]) -> int:
    """The numbers in A and B of a linear layer."""
    layer = weight.name.removesuffix(".weight")
    if shape.gates == 1 and layer.endswith(".linear_fc1"):
        hf_names = ()
    target = adapter_target(lora, layer, [name.removesuffix(".weight") for name in hf_names])
    if target is None:
        return 0
    pieces = len(target.pieces)
    heights = (shape.queries, shape.keys, shape.keys) if pieces == 3 else (weight.rows // pieces,) * pieces
    rows = sum(height for height, pair in zip(heights, target.pieces, strict=True) if pair is not None)
    return lora.rank * (len(target.factors) * weight.columns + rows)


def _norm(shape: Shape, width: int) -> int:
    return 2 * width if shape.config.normalization == "LayerNorm" else width
