"""Bytes of activations: what a layer saves for its backward pass, and what passes through it at once.

The terms follow Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", with gated MLPs,
grouped queries, attention that saves no scores, and experts that get equal shares of the tokens. For the local layers,
they are the tensors that the layers save on a GPU; for Transformer Engine, the documented ones, not measured yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.memory.parameters import Shape

_FLOAT = 4


@dataclass(frozen=True)
class Tokens:
    """Tokens of one micro-batch on one rank.

    Attributes:
        count: rows x padded length, divided over the cp axis.
        local: the tokens that a rank keeps between layers: divided over tp under sequence parallelism.
        size: bytes of one element of the hidden states.
        fused: whether layers are Transformer Engine's.
    """

    count: int
    local: int
    size: int
    fused: bool = False


def layer_saved(shape: Shape, tokens: Tokens, with_experts: bool, *, everything: bool = False) -> int:
    """Return the bytes that one layer saves for the backward pass of one micro-batch.

    Args:
        shape: of the model.
        tokens: of the micro-batch.
        with_experts: whether the layer has experts.
        everything: count the parts too that ``recompute_modules`` computes again.
    """
    config = shape.config
    selective = config.recompute_granularity == "selective" and not everything
    recomputed = set(config.recompute_modules or ()) if selective else set()
    norm = tokens.size * tokens.local * shape.hidden  # a norm saves its input
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    attention = norm + tokens.size * tokens.local * shape.hidden  # the norm's input, and its output
    # Queries, keys and values stay alive in one tensor; rotated queries and keys are new ones.
    rotated = 0 if config.qk_layernorm and tokens.fused else shape.queries + shape.keys
    core = tokens.size * tokens.count * (rotated + shape.queries) + _FLOAT * tokens.count * heads
    attention += tokens.size * tokens.count * (shape.queries + 2 * shape.keys) + core
    if config.qk_layernorm:  # the queries are copied for it, and the keys are read where they are
        attention += tokens.size * tokens.count * shape.queries
    if config.hidden_dropout:
        attention += 2 * tokens.local * shape.hidden
    if "layernorm" in recomputed:
        norm = 0
    feed_forward = norm + tokens.size * tokens.local * shape.hidden
    feed_forward += _experts_saved(shape, tokens, recomputed) if with_experts else _mlp_saved(shape, tokens, recomputed)
    return attention + feed_forward


def _expert_rows(shape: Shape, tokens: Tokens) -> int:
    """The tokens that the experts of a rank compute: those of its etp ranks, which the dispatcher gathers.

    Ranks of the ep axis send each other as many as they receive.
    """
    return tokens.local * shape.config.moe_router_topk * shape.etp


def _activated(shape: Shape, tokens: Tokens) -> int:
    """Tensors as wide as the MLP that the activation saves: its input, its result, and with gates their product."""
    if tokens.fused:
        return shape.gates + 1
    return 2 * shape.gates


def _mlp_saved(shape: Shape, tokens: Tokens, recomputed: set[str]) -> int:
    if "mlp" in recomputed:
        return 0
    computed_again = shape.config.gated_linear_unit and shape.config.activation_func is torch.nn.functional.silu
    wide = shape.gates + 1 if computed_again else _activated(shape, tokens)  # SwiGLU computes the activation again
    return tokens.size * tokens.count * shape.mlp * wide


def _experts_saved(shape: Shape, tokens: Tokens, recomputed: set[str]) -> int:
    if "moe" in recomputed:
        return 0
    config = shape.config
    copies, routed = _expert_rows(shape, tokens), tokens.local * config.moe_router_topk
    wide = shape.gates if "moe_act" in recomputed else _activated(shape, tokens)
    saved = tokens.size * copies * (wide * shape.expert_mlp + shape.hidden)
    saved += tokens.size * routed * shape.hidden  # the results of the experts, reduced over the etp ranks
    if "moe_act" not in recomputed:
        saved += _FLOAT * copies * shape.expert_mlp  # the product with the probabilities, in float32
    saved += 4 * _FLOAT * tokens.local * config.num_moe_experts  # logits, probabilities and the map of the router
    return saved + tokens.size * tokens.count * shape.shared_mlp * _activated(shape, tokens)


def layer_gradients(shape: Shape, tokens: Tokens, with_experts: bool) -> int:
    """Return the bytes of the gradients that exist while the backward pass is in one layer."""
    rows, width = (_expert_rows(shape, tokens), shape.expert_mlp) if with_experts else (tokens.count, shape.mlp)
    return tokens.size * (rows * width * (shape.gates + 1) + 2 * tokens.local * shape.hidden)


def layer_passing(shape: Shape, tokens: Tokens, with_experts: bool, masks: int = 0, *, decoding: bool = False) -> int:
    """Return the bytes that exist while one layer runs without gradients.

    Args:
        shape: of the model.
        tokens: the tokens that pass through the layer.
        with_experts: whether the layer has experts.
        masks: bytes of attention masks, which exist during attention.
        decoding: whether the layer runs in generation, whose linear layers copy no input.
    """
    size, count, hidden = tokens.size, tokens.count, shape.hidden
    attention = size * count * (3 * shape.queries + 3 * shape.keys) + masks
    if with_experts:
        copies = _expert_rows(shape, tokens)
        routed = tokens.local * shape.config.moe_router_topk
        inputs = copies if decoding else 2 * copies  # of the experts, which a linear layer copies
        mlp = size * (routed + inputs) * hidden + (2 * size * shape.gates + _FLOAT) * copies * shape.expert_mlp
        if tokens.fused:  # the input and the result of the activation, in one kernel
            mlp -= size * copies * (shape.gates - 1) * shape.expert_mlp
    else:
        mlp = size * count * shape.mlp * (shape.gates + 1 if tokens.fused else shape.gates)
    if decoding:
        return 2 * size * tokens.local * hidden + max(mlp, attention)
    if tokens.fused:  # what enters the stage, the layer and the MLP
        return 3 * size * tokens.local * hidden + max(mlp, attention)
    if not with_experts:  # the input of the second linear layer is copied, and its output is not divided yet
        mlp += size * count * (shape.mlp + hidden)
    return size * tokens.local * hidden + max(mlp, attention)


def recomputes_all(shape: Shape) -> bool:
    """Return whether layers are computed again in the backward pass as a whole."""
    return shape.config.recompute_granularity == "full"


def in_flight(micro_batches: int, pp: int, pp_rank: int, vpp: int | None) -> int:
    """Return how many micro-batches have saved activations at once, in chunks of the stage.

    1F1B: ``pp - pp_rank``. Interleaved: the micro-batches of the warm-up and one more,
    ``2 (pp - pp_rank - 1) + (vpp - 1) pp + 1``.

    Args:
        micro_batches: of one optimizer step.
        pp: stages of the pipeline.
        pp_rank: the stage.
        vpp: chunks of each stage; None for one.
    """
    if vpp is None:
        return min(micro_batches, pp - pp_rank)
    return min(micro_batches * vpp, 2 * (pp - pp_rank - 1) + (vpp - 1) * pp + 1)
