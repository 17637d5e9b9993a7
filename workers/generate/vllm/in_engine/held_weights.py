"""Read the weights that a model of vLLM computes with, as the tensors of a Hugging Face checkpoint, and hash them.

On a CPU, vLLM computes with packed copies of matrices and experts, and drops or keeps the tensors that they were made
of. So the copies are read: a matrix is what it makes of the unit vectors, and experts are put back into the order from
which a tensor of numbers is packed. Both are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from bit_sums import IndexKeys, sum_of_bits  # workers/weights/hashing, on the path of the engine's processes
from torch import Tensor, nn
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

__all__ = ["PartSum", "part_sums", "unreadable", "whole_sums"]

_PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_UNCHANGED_EXPERTS = (UnquantizedMoeBackend.CPU, UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
_ROWS_AT_ONCE = 1024  # unit vectors


class _Part(NamedTuple):
    """The part of a tensor that this process has: ``tensor`` begins at ``first`` of ``dim``."""

    name: str
    tensor: Tensor
    dim: int = 0
    first: int = 0
    copy: str = ""


class PartSum(NamedTuple):
    """The sum of a part.

    Attributes:
        name: of the whole tensor.
        dtype: the name of its dtype.
        copy: the layer that holds it, if it is not the layer that it is named after.
        first: the index of the part in the divided dim.
        value: a signed 64-bit integer.
    """

    name: str
    dtype: str
    copy: str
    first: int
    value: int


def unreadable(model: nn.Module) -> str:
    """Return why the weights of a model cannot be read, or an empty text."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, LinearBase) and not isinstance(method, UnquantizedLinearMethod):
            return f"{name} computes with {type(method).__name__}"
        if isinstance(module, RoutedExperts):
            backend = getattr(method, "unquantized_backend", None)
            if backend not in _UNCHANGED_EXPERTS:
                return f"{name} computes with {getattr(backend, 'value', type(method).__name__)}"
            if module.expert_map is not None:
                return f"{name} has a part of the experts"
    return ""


@torch.no_grad()
def part_sums(model: nn.Module) -> list[PartSum]:
    """Return the sums of all parts that this process computes with."""
    keys, order = IndexKeys(), _PackedOrder()
    parts, sums = [], []
    for part in _parts(model, order):
        first = [part.first if dim == part.dim else 0 for dim in range(part.tensor.dim())]
        parts.append(part)
        sums.append(sum_of_bits(part.tensor, first, part.tensor.dtype, keys))
    values = torch.stack(sums).tolist()
    dtypes = [str(part.tensor.dtype).removeprefix("torch.") for part in parts]
    return [
        PartSum(part.name, dtype, part.copy, part.first, value)
        for part, dtype, value in zip(parts, dtypes, values, strict=True)
    ]


def whole_sums(of_ranks: Sequence[Sequence[PartSum]]) -> list[tuple[str, str, int]]:
    """Return name, dtype and sum of the whole tensors, one for each copy that the ranks of an engine have.

    Args:
        of_ranks: the parts of each rank.
    """
    found: dict[tuple[str, str, str], dict[int, list[int]]] = {}
    for part in (PartSum(*each) for of_rank in of_ranks for each in of_rank):
        found.setdefault((part.name, part.dtype, part.copy), {}).setdefault(part.first, []).append(part.value)
    sums = []
    for (name, dtype, _), values in found.items():
        copies = max(map(len, values.values()))
        wholes = {sum(each[min(copy, len(each) - 1)] for each in values.values()) for copy in range(copies)}
        sums += [(name, dtype, (whole + (1 << 63)) % (1 << 64) - (1 << 63)) for whole in sorted(wholes)]
    return sums


def _parts(model: nn.Module, order: _PackedOrder) -> Iterator[_Part]:
    tied = bool(model.config.tie_word_embeddings)  # type: ignore[union-attr]
    for name, module in model.named_modules():
        if isinstance(module, VocabParallelEmbedding):
            yield from _of_vocabulary(name, module, tied)
        elif isinstance(module, LinearBase):
            yield from _of_linear(name, module)
        elif isinstance(module, RoutedExperts):
            yield from _of_experts(module, order)
        else:
            for parameter, tensor in module.named_parameters(recurse=False):
                yield _Part(f"{name}.{parameter}", tensor)


def _of_vocabulary(name: str, module: Any, tied: bool) -> Iterator[_Part]:
    """The embedding, or the output layer: of tied ones the same tensor, which the output layer may hold a copy of."""
    first, last = module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index
    if isinstance(module, ParallelLMHead):
        matrix = _matrix(module, module.embedding_dim)
        tensor, copy = ("model.embed_tokens.weight", name) if tied else (f"{name}.weight", "")
    else:
        matrix, tensor, copy = module.weight, f"{name}.weight", ""
    yield _Part(tensor, matrix[: last - first], 0, first, copy)


def _of_linear(name: str, module: Any) -> Iterator[_Part]:
    wide = module.input_size_per_partition if isinstance(module, RowParallelLinear) else module.input_size
    matrix = _matrix(module, wide)
    if isinstance(module, RowParallelLinear):
        yield _Part(f"{name}.weight", matrix, 1, module.tp_rank * wide)
        if module.bias is not None:
            yield _Part(f"{name}.bias", module.bias)
        return
    path, _, last = name.rpartition(".")
    top = 0
    for part, rows, first in _rows_of(module, last):
        yield _Part(f"{path}.{part}.weight", matrix[top : top + rows], 0, first)
        if module.bias is not None:
            yield _Part(f"{path}.{part}.bias", module.bias[top : top + rows], 0, first)
        top += rows


def _rows_of(module: Any, name: str) -> Iterator[tuple[str, int, int]]:
    """By tensor in the rows of a layer: its name, its rows here, and the index of the first one in the tensor."""
    rank, size = module.tp_rank, module.tp_size
    if isinstance(module, QKVParallelLinear):
        query, key = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
        value = module.num_kv_heads * module.v_head_size
        group = rank // module.num_kv_head_replicas
        firsts = (rank * query, group * key, group * value)
        yield from zip(_PACKED[name], (query, key, value), firsts, strict=True)
    elif isinstance(module, MergedColumnParallelLinear):
        for part, rows in zip(_PACKED[name], module.output_sizes, strict=True):
            yield part, rows // size, rank * (rows // size)
    elif isinstance(module, ColumnParallelLinear):
        yield name, module.output_size_per_partition, rank * module.output_size_per_partition
    else:
        yield name, module.output_size, 0


def _of_experts(module: Any, order: _PackedOrder) -> Iterator[_Part]:
    parallel, rows = module.moe_config.moe_parallel_config, module.moe_config.intermediate_size_per_partition_unpadded
    fused = module.quant_method.moe_kernel.fused_experts
    first = parallel.tp_rank * rows
    gate, up, down = module.ckpt_gate_proj_name, module.ckpt_up_proj_name, module.ckpt_down_proj_name
    for expert in range(module.local_num_experts):
        both = order.unpacked(module.w13_weight[expert], fused)
        half = len(both) // 2
        name = f"{module.layer_name}.{expert}"
        yield _Part(f"{name}.{gate}.weight", both[:rows], 0, first)
        yield _Part(f"{name}.{up}.weight", both[half : half + rows], 0, first)
        yield _Part(f"{name}.{down}.weight", order.unpacked(module.w2_weight[expert], fused)[:, :rows], 1, first)


def _matrix(layer: Any, wide: int) -> Tensor:
    """The weight ``[out, in]`` that a layer multiplies with: on a CPU a packed copy, whose columns are computed."""
    compute: Callable[..., Tensor] | None = getattr(layer, "cpu_linear", None)
    if compute is None:
        weight: Tensor = layer.weight
        return weight
    columns = []
    for first in range(0, wide, _ROWS_AT_ONCE):
        rows = min(_ROWS_AT_ONCE, wide - first)
        units = torch.zeros(rows, wide, dtype=layer.weight.dtype)
        units[:, first : first + rows].fill_diagonal_(1)
        columns.append(compute(units, layer.weight, None))
    return torch.cat(columns).t()


class _PackedOrder:
    """The order in which vLLM's CPU kernels keep the elements of an expert's matrix, by its shape."""

    def __init__(self) -> None:
        self._positions: dict[tuple[int, ...], Tensor] = {}

    def unpacked(self, matrix: Tensor, experts: Any) -> Tensor:
        """Return an expert's matrix, in the order in which it was before ``experts`` packed it."""
        if not hasattr(experts, "isa") or experts._use_zentorch:
            return matrix
        shape = tuple(matrix.shape)
        if shape not in self._positions:
            self._positions[shape] = _packed_positions(matrix, experts.isa)
        flat = torch.empty_like(matrix).view(-1)
        flat[self._positions[shape]] = matrix.reshape(-1)
        return flat.view(shape)


def _packed_positions(matrix: Tensor, isa: str) -> Tensor:
    """For each element of a packed matrix, where it was before: the numbers of all, packed one byte at a time."""
    count = matrix.numel()
    numbers, positions = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    for shift in range(0, count.bit_length(), 8):
        digits = (numbers >> shift & 255).to(matrix.dtype).view(1, *matrix.shape)  # exact in bfloat16
        positions += cpu_prepack_moe_weight(digits, isa).view(-1).to(torch.int64) << shift
    return positions
