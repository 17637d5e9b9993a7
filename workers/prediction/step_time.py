"""Predict the seconds of an optimizer step and of generation on a layout: arithmetic alone, without torch.

It is for comparing layouts. The docs have its errors on published figures: docs/prediction.md.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from mcontroller.errors import ConfigError
from workers.config.model import ModelConfig
from workers.config.parallel import ParallelConfig

TABLE = Path(__file__).with_name("hardware.toml")
ONCE = {"dp", "edp"}
"""Axes that communicate once in an optimizer step, and not in every micro-batch."""


@dataclass(frozen=True)
class Hardware:
    """GPUs and links; ``hardware.toml`` says what each number is."""

    flops: float
    flops_fp8: float
    memory: float
    memory_bandwidth: float
    gpus_per_node: int
    bandwidth: float
    bandwidth_across: float
    latency: float
    products: float
    passes: float
    exposed: float
    decoding: float
    decoding_in_workers: float
    fixed: float


def hardware_of(name: str) -> Hardware:
    """Return the hardware of a name in ``hardware.toml``, or the only table in a TOML file.

    Raises:
        ConfigError: there is no such name or file, or it lacks a number.
    """
    path = Path(name) if name.endswith(".toml") else TABLE
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the hardware in {name} cannot be read: {error}", key="hardware", value=name) from error
    chosen = tables.get(name) if path == TABLE else next(iter(tables.values()), None)
    if not isinstance(chosen, dict):
        known = ", ".join(tables) if path == TABLE else "one table"
        text = f"hardware is {name!r}; expected {known}, or a TOML file"
        raise ConfigError(text, key="hardware", value=name)
    expected = {field.name for field in fields(Hardware)}
    if expected != chosen.keys():
        text = f"{path}: wrong or missing keys {', '.join(sorted(expected ^ chosen.keys()))}; {TABLE} has an example"
        raise ConfigError(text, key="hardware", value=name)
    return Hardware(**chosen)


@dataclass(frozen=True)
class StepTime:
    """The seconds of an optimizer step.

    Attributes:
        compute: of a rank of the stage with the most layers, in all micro-batches.
        communication: inside of the pipeline, if computation does not hide it.
        idle: of the pipeline.
        once: gradients, weights and the optimizer.
        bubble: the share of the pipeline's time that is idle.
    """

    compute: float
    communication: float
    idle: float
    once: float
    bubble: float

    @property
    def seconds(self) -> float:
        """All of them together."""
        return self.compute + self.communication + self.idle + self.once


def step_time(
    model: ModelConfig,
    parallel: ParallelConfig,
    world_size: int,
    micro_batches: int,
    rows: int,
    length: int,
    traffic: Iterable[tuple[str, str, int]],
    hardware: Hardware,
    *,
    fp8: bool = False,
) -> StepTime:
    """Predict an optimizer step.

    Args:
        model: the model.
        parallel: its axes.
        world_size: number of ranks.
        micro_batches: of each data-parallel rank.
        rows: rows of a micro-batch.
        length: tokens of a row.
        traffic: (axis, operation, bytes of all ranks) of the step, as ``communication_of_step`` returns them.
        hardware: GPUs and links.
        fp8: whether matrix products are computed in 8 bits.
    """
    stages, chunks = parallel.pp, parallel.vpp or 1
    layers = -(-model.num_layers // (stages * chunks)) * chunks
    tokens = rows * length / parallel.cp
    products, attention = layer_flops(model, length)
    head = 2.0 * model.hidden_size * model.vocab_size / (layers * stages)  # spread over the layers, as splits do
    peak = hardware.flops_fp8 if fp8 else hardware.flops
    of_token = products / peak + (attention + head) / hardware.flops
    moved = 3 * 2 * _elements(model) * hardware.passes / hardware.memory_bandwidth
    compute = micro_batches * layers * tokens / parallel.tp * (3 * of_token / hardware.products + moved)
    inside = once = 0.0
    for axis, operation, nbytes in traffic:
        seconds = _link_seconds(parallel, world_size, axis, operation, nbytes / world_size, hardware)
        if ONCE & set(axis.split("-")):
            once += seconds
        else:
            inside += seconds * hardware.exposed
    weights = _parameters(model) / (parallel.tp * parallel.pp)
    sharded = world_size / (parallel.tp * parallel.pp * parallel.cp)
    once += 30 * weights / sharded / hardware.memory_bandwidth  # float32 weights, moments and gradients, in and out
    busy = compute + inside
    idle = busy * (stages - 1) / (micro_batches * chunks)
    return StepTime(compute, inside, idle, once, (stages - 1) / (micro_batches * chunks + stages - 1))


def generation_seconds(
    model: ModelConfig,
    parallel: ParallelConfig,
    world_size: int,
    rows: int,
    mean: int,
    longest: int,
    hardware: Hardware,
    *,
    prompt: int = 0,
    in_workers: bool = False,
) -> float:
    """Predict the generation of responses, one token of each sequence at a time.

    Args:
        model: the model, in 16 bits.
        parallel: axes of the engine, of which tp and pp count.
        world_size: number of ranks.
        rows: responses of all ranks.
        mean: tokens of a sequence in the mean.
        longest: tokens of the longest sequence.
        hardware: GPUs and links.
        prompt: tokens at the beginning of each sequence that are not generated.
        in_workers: whether Megatron's layers generate, and not an engine with graphs of CUDA.
    """
    split = parallel.tp * parallel.pp
    of_layer = hardware.decoding_in_workers if in_workers else hardware.decoding
    at_once = -(-rows * split // world_size)
    products, attention = layer_flops(model, mean)
    *_, keys = _attention(model)
    read = 2 * _parameters(model, at_once) / split / hardware.memory_bandwidth
    read += model.num_layers * (of_layer + (2 * hardware.latency if parallel.tp > 1 else 0.0))
    cached = at_once * model.num_layers * 2 * keys * (mean**2 - prompt**2) / 2 / split / hardware.memory_bandwidth
    computed = at_once * mean * model.num_layers * (products + attention) / split / hardware.flops / hardware.products
    return (longest - prompt) * read + cached + computed


def weight_seconds(model: ModelConfig, senders: int, receivers: int, hardware: Hardware) -> float:
    """Predict the transfer of a model's weights in 16 bits between two groups of GPUs, across nodes."""
    return 2 * _parameters(model) / min(senders, receivers) / hardware.bandwidth_across


def layer_flops(model: ModelConfig, length: int) -> tuple[float, float]:
    """Return the operations of the forward pass of one token in one layer: matrix products, and causal attention."""
    weights, compared, read, _ = _attention(model)
    return 2.0 * (weights + _experts(model) * _of_mlp(model)), 1.0 * length * (compared + read)


def _attention(model: ModelConfig) -> tuple[int, int, int, int]:
    """Return the weights of a layer's attention, and the channels that it compares, that it reads and caches."""
    hidden, heads, given = model.hidden_size, model.num_attention_heads, model.transformer
    if not given.get("multi_latent_attention"):
        width = model.kv_channels or hidden // heads
        queries, keys = heads * width, (model.num_query_groups or heads) * width
        return hidden * (2 * queries + 2 * keys), queries, queries, 2 * keys
    # Megatron's defaults
    sizes = {"q_lora_rank": 512, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
    rank, latent, width, position, value = (given.get(name, default) for name, default in sizes.items())
    queries, values, cached = heads * (width + position), heads * value, latent + position
    of_queries = hidden * queries if rank is None else rank * (hidden + queries)
    return of_queries + hidden * cached + latent * (heads * width + values) + values * hidden, queries, values, cached


def _experts(model: ModelConfig) -> int:
    return model.moe_router_topk if model.num_moe_experts else 1


def _mlp_width(model: ModelConfig) -> int:
    width = model.ffn_hidden_size or 4 * model.hidden_size
    return (model.moe_ffn_hidden_size or width) if model.num_moe_experts else width


def _of_mlp(model: ModelConfig) -> int:
    return (3 if model.gated_linear_unit else 2) * model.hidden_size * _mlp_width(model)


def _elements(model: ModelConfig) -> float:
    """Elements that elementwise work of one layer reads and writes for one token: norms, attention, gates, routing."""
    _, compared, read, _ = _attention(model)
    routed = 4 * model.hidden_size * _experts(model) if model.num_moe_experts else 0
    return 8 * model.hidden_size + 2 * (compared + read) + 4 * _experts(model) * _mlp_width(model) + routed


def _parameters(model: ModelConfig, tokens: int | None = None) -> float:
    """Parameters of the model; of the experts, those that so many tokens use."""
    products, _ = layer_flops(model, 0)
    dense = products / 2 - _experts(model) * _of_mlp(model)
    experts = float(model.num_moe_experts or 1)
    if tokens is not None and model.num_moe_experts:
        experts *= 1 - (1 - model.moe_router_topk / model.num_moe_experts) ** tokens
    return model.num_layers * (dense + experts * _of_mlp(model)) + 2 * model.vocab_size * model.hidden_size


def _link_seconds(
    parallel: ParallelConfig, world_size: int, axis: str, operation: str, nbytes: float, hardware: Hardware
) -> float:
    """Seconds of what a rank passes to one operation in a step; axes that fit into a node are taken to be in one."""
    sizes, axes = parallel.layout(world_size).sizes, axis.split("-")
    grid = ("etp", "ep", "edp", "pp") if {"etp", "ep", "edp"} & {*axes} else ("tp", "cp", "dp", "pp")
    members = math.prod(sizes[each] for each in axes)
    span = math.prod(sizes[each] for each in grid[: grid.index(axes[-1]) + 1])
    bandwidth = hardware.bandwidth if span <= hardware.gpus_per_node else hardware.bandwidth_across
    share = {
        "all_reduce": 2 * (members - 1) / members,
        "all_gather_into_tensor": members - 1.0,
        "all_gather": members - 1.0,
        "reduce_scatter_tensor": (members - 1) / members,
        "all_to_all_single": (members - 1) / members,
    }.get(operation, 1.0)
    return nbytes * share / bandwidth
