"""LoRA on Megatron-Core's parallel linear layers, as PEFT computes it.

The weights of the model keep their names. The adapters of a chunk are in its module ``lora``, and add to the output of
a linear layer in a forward hook. q, k and v, which are one layer of Megatron, have a pair of A and B each, as in PEFT;
so have gate and up, but those of an expert share an A. With tp (etp for experts), one of the two is divided as the
weight of the layer is:

======  =================================  ==================================  =====================================
layer   A ``[rank, in]``                   B ``[out, rank]``                   between A and B
======  =================================  ==================================  =====================================
column  whole                              divided by rows                     gathered (sp), or its gradient summed
row     divided by columns                 whole                               summed, or reduced and scattered (sp)
whole   whole                              whole                               nothing (down-projections of MLA)
======  =================================  ==================================  =====================================

What travels has the width of the rank. Under sequence parallelism, the gradient of the whole factor is of this rank's
tokens, and Megatron sums it over tp as that of a norm. Merging needs no communication.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor, nn
from torch.nn.functional import dropout, layer_norm, linear, pad, rms_norm

from parallel_state.megatron import EXPERT_INPUT_RNG
from workers.config.lora import LoraConfig
from workers.config.trained_weights import Target


class Adapter(nn.Module):
    """The pairs of A and B of one linear layer; of a group of experts, those of every local expert.

    Args:
        target: which rows of the weight they change.
        layer: the linear layer.
        heights: rows of each piece of the weight in one of its blocks; q, k and v are interleaved by query group.
        lora: rank and factor.
        config: Megatron's, of the model.
        pg: the groups of the layout.

    Attributes:
        target: as passed.
        group: the ranks that one of the factors is divided over.
        split: the dim of the divided factor: 0 of B for a column-parallel layer, 1 of A for a row-parallel one; None if
            every tp rank has the whole layer.
        numbers: of the experts in the whole model; [None] if the layer is not of experts.
    """

    def __init__(
        self,
        target: Target,
        layer: Any,
        heights: Sequence[int],
        lora: LoraConfig,
        config: Any,
        pg: ProcessGroupCollection,
    ) -> None:
        super().__init__()
        self.target, self.rank, self.scale, self.dropout = target, lora.rank, lora.scale, lora.dropout
        kind = type(layer).__name__
        self.split = 1 if "RowParallel" in kind else 0 if "ColumnParallel" in kind else None
        self.group = pg.expt_tp if target.experts else pg.tp
        self.expert_replicas = pg.expt_dp if target.experts else None
        local = layer.num_gemms if target.experts else 1
        self.numbers: list[int | None] = [None]
        if target.experts:
            self.numbers = [pg.ep.rank() * local + index for index in range(local)]
        self.heights = tuple(heights)
        self.sequence_parallel = config.sequence_parallel and not target.experts  # generation switches it off
        weight = layer.weight0 if target.experts else layer.weight
        self.blocks = weight.size(0) // sum(heights)
        for number in self.numbers:
            for pair in range(len(target.factors)):
                self._add(self._name("A", pair, number), (lora.rank, weight.size(1)), config, weight)
            for piece, of_pair in enumerate(target.pieces):
                if of_pair is not None:
                    name = self._name("B", of_pair, number, piece)
                    self._add(name, (self.blocks * heights[piece], lora.rank), config, weight)

    def _name(self, factor: str, pair: int, number: int | None, piece: int = 0) -> str:
        """The name of a parameter, such as ``A_q_proj``, or ``B1_gate_up_proj_3`` of an expert's second piece."""
        several = factor == "B" and self.target.pieces.count(pair) > 1
        end = self.target.factors[pair].rpartition(".")[2]
        return f"{factor}{piece if several else ''}_{end}{'' if number is None else f'_{number}'}"

    def _add(self, name: str, shape: tuple[int, int], config: Any, weight: Tensor) -> None:
        value = torch.zeros(shape, dtype=config.params_dtype, device=weight.device)
        parameter: Any = nn.Parameter(value)
        divided = name[0] == self.divided
        if divided or self.target.experts:
            set_tensor_model_parallel_attributes(parameter, True, self.split, 1)
        if not divided:
            parameter.sequence_parallel = self.sequence_parallel
        if self.target.experts:
            # Megatron counts every parameter of tp rank 0 in the norm of the gradients, and others if they are divided.
            parameter.shared = not divided and self.group.rank() > 0
            parameter.allreduce = getattr(weight, "allreduce", True)
        self.register_parameter(name, parameter)

    @property
    def divided(self) -> str:
        """The factor that is divided, ``A`` or ``B``; empty if neither is."""
        return "" if self.split is None else "BA"[self.split]

    def a(self, pair: int, number: int | None) -> Tensor:
        """Return A of a pair ``[rank, in]``, of the expert with this number; None if the layer is not of experts."""
        value: Tensor = getattr(self, self._name("A", pair, number))
        return value

    def b(self, piece: int, number: int | None) -> Tensor:
        """Return B ``[rows, rank]`` of the rows of a piece that has a pair."""
        value: Tensor = getattr(self, self._name("B", self.target.pieces[piece] or 0, number, piece))
        return value

    def both(self, number: int | None) -> tuple[Tensor, Tensor]:
        """Return A ``[pairs * rank, in]`` and B ``[out, pairs * rank]``, in the order of the weight's rows.

        A row of B has zeros for the pairs that are not its own.
        """
        pairs = len(self.target.factors)
        a = torch.cat([self.a(pair, number) for pair in range(pairs)])
        rows = []
        for piece, (height, pair) in enumerate(zip(self.heights, self.target.pieces, strict=True)):
            if pair is None:
                rows.append(a.new_zeros(self.blocks, height, pairs * self.rank))
                continue
            b = self.b(piece, number).view(self.blocks, height, self.rank)
            rows.append(pad(b, (pair * self.rank, (pairs - pair - 1) * self.rank)))
        return a, torch.cat(rows, 1).flatten(0, 1)

    def forward(self, inputs: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Return what is added to the layer's output, for the input of its product.

        Args:
            inputs: ``[seq, batch, in]``; of experts ``[tokens, in]``, sorted by expert.
            counts: tokens of each local expert.
        """
        inputs = self._dropped(inputs)
        if counts is not None:
            parts = torch.split(inputs, [int(count) for count in counts])
            outputs = [self._of_expert(part, number) for part, number in zip(parts, self.numbers, strict=True)]
            return self.scale * torch.cat(outputs)
        a, b = self.both(None)
        narrow = linear(inputs, a)
        if self.split is None:
            pass
        elif self.split == 0 and self.sequence_parallel:
            narrow = gather_from_sequence_parallel_region(narrow, group=self.group)
        elif self.split == 0:
            narrow = copy_to_tensor_model_parallel_region(narrow, group=self.group)
        elif self.sequence_parallel:
            narrow = reduce_scatter_to_sequence_parallel_region(narrow, group=self.group)
        else:
            narrow = reduce_from_tensor_model_parallel_region(narrow, group=self.group)
        return self.scale * linear(narrow, b)

    def _of_expert(self, tokens: Tensor, number: int | None) -> Tensor:
        """The output of one expert's pair; the token dispatcher sums outputs, and gradients of inputs, over etp."""
        a, b = self.both(number)
        if self.split == 0:
            a = copy_to_tensor_model_parallel_region(a, group=self.group)
        else:
            b = copy_to_tensor_model_parallel_region(b, group=self.group)
        return linear(linear(tokens, a), b)

    def _dropped(self, inputs: Tensor) -> Tensor:
        """The input after dropout: with the same numbers on all ranks that have the same input."""
        if not self.training or self.dropout == 0.0:
            return inputs
        tracker = get_cuda_rng_tracker()
        if self.target.experts:
            fork = tracker.fork(get_expert_parallel_rng_tracker_name() if self.split else EXPERT_INPUT_RNG)
        else:
            fork = tracker.fork() if self.split or self.sequence_parallel else contextlib.nullcontext()
        with fork:
            return dropout(inputs, self.dropout)

    @torch.no_grad()
    def merged(self, weight: Tensor, number: int | None) -> Tensor:
        """Return this rank's weight of the layer with the adapter added, in new memory; computed in float32."""
        a, b = self.both(number)
        return torch.addmm(weight.float(), b.float(), a.float(), alpha=self.scale).to(weight.dtype)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Draw A uniformly between ``+-1 / sqrt(in)``, as PEFT does, and the same in every layout; B stays 0."""
        ways, index = (self.group.size(), self.group.rank()) if self.split else (1, 0)
        for number in self.numbers:
            for pair, name in enumerate(self.target.factors):
                value = self.a(pair, number)
                digest = hashlib.sha256(f"{seed}/{self.target.name}/{name}/{number}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
                width = value.size(1) * ways
                whole = torch.empty(len(value), width, dtype=torch.float32).uniform_(-1, 1, generator=generator)
                value.copy_(whole.chunk(ways, 1)[index] / math.sqrt(width))


class Adapters(nn.Module):
    """The adapters of a model chunk, which add to the outputs of its linear layers while ``enabled``.

    Args:
        dropout: dropout probability of their inputs.

    Attributes:
        enabled: False computes, and moves, the model without them.
        dropout: as passed.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.enabled, self.dropout = True, dropout
        self._by_weight: dict[str, tuple[Adapter, int | None]] = {}

    def add(self, adapter: Adapter, layer: Any, local_name: str) -> None:
        """Let an adapter add to the output of a layer.

        Args:
            adapter: of the layer.
            layer: the linear layer.
            local_name: its name in the chunk.
        """
        parent: nn.Module = self
        *path, last = adapter.target.name.removeprefix("decoder.").split(".")
        for name in path:
            if name not in parent._modules:
                parent.add_module(name, nn.Module())
            parent = parent.get_submodule(name)
        parent.add_module(last, adapter)
        for index, number in enumerate(adapter.numbers):
            suffix = "weight" if number is None else f"weight{index}"
            self._by_weight[f"{local_name}.{suffix}"] = adapter, number
        if hasattr(layer, "post_layernorm"):  # of Gemma, inside of the layer
            inputs: list[Tensor] = []
            layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
            layer.post_layernorm.register_forward_pre_hook(lambda _, args: self._sum(adapter, args[0], inputs.pop()))
        else:
            layer.register_forward_hook(self._adding(adapter))

    def _sum(self, adapter: Adapter, output: Tensor, inputs: Tensor) -> Tensor:
        return output + adapter(inputs) if self.enabled else output

    def _adding(self, adapter: Adapter) -> Callable[..., Any]:
        def hook(layer: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any] | None:
            if not self.enabled:
                return None
            counts = inputs[1] if adapter.target.experts else None
            return output[0] + adapter(input_of_product(layer, inputs[0]), counts), output[1]

        return hook

    def merging(self, local_name: str) -> Callable[[Tensor], Tensor] | None:
        """Return what adds the adapter to a weight of the chunk (see ``Adapter.merged``); None if it has none."""
        weight_adapter = self._by_weight.get(local_name) if self.enabled else None
        return None if weight_adapter is None else lambda weight: weight_adapter[0].merged(weight, weight_adapter[1])

    def __iter__(self) -> Iterator[Adapter]:
        """Iterate over the adapters of the chunk."""
        return (module for module in self.modules() if isinstance(module, Adapter))

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the factors as Megatron's sharded tensors. Their names have the layers and experts of all ranks."""
        sharded: dict[str, Any] = {}
        replicas = (metadata or {})["dp_cp_group"]
        for name, adapter in self.named_modules():
            if not isinstance(adapter, Adapter):
                continue
            factors = dict(adapter.named_parameters())
            axes = {
                factor: adapter.split
                for factor in factors
                if factor[0] == adapter.divided and adapter.split is not None
            }
            tensors = make_sharded_tensors_for_checkpoint(
                factors, f"{prefix}{name}.", axes, tp_group=adapter.group, dp_cp_group=replicas
            )
            if adapter.expert_replicas is not None:
                for tensor in tensors.values():
                    tensor.replica_id = (*tensor.replica_id[:2], adapter.expert_replicas.rank())
            sharded |= tensors
        return sharded


def input_of_product(layer: Any, hidden: Tensor) -> Tensor:
    """Return the input of a linear layer's product: after the norm that some have inside."""
    weight = getattr(layer, "layer_norm_weight", None)
    if weight is None:
        return hidden
    config = get_model_config(layer)
    scale = weight + 1 if config.layernorm_zero_centered_gamma else weight
    if config.normalization == "RMSNorm":
        return rms_norm(hidden, scale.shape, scale, layer.eps)
    return layer_norm(hidden, scale.shape, scale, layer.layer_norm_bias, layer.eps)


def adapters_of(chunks: Sequence[Any]) -> list[Adapters]:
    """Return the adapters of the chunks that have any, wrapped or not."""
    attached = (getattr(unwrap_model(chunk), "lora", None) for chunk in chunks)
    return [module for module in attached if isinstance(module, Adapters)]


def changed_beside_adapters(chunks: Sequence[Any]) -> list[str]:
    """Return the names of the tensors of this rank, outside adapters, that an update may change.

    These are the trained weights, and the buffers that a checkpoint contains, such as the biases with which routers
    choose experts; not the biases if ``moe_router_bias_update_rate`` is 0. Without such tensors on any rank, the model
    without its adapters stays what it was.

    Args:
        chunks: this rank's model chunks, wrapped or not.
    """
    names: list[str] = []
    for chunk in map(unwrap_model, chunks):
        for prefix, module in chunk.named_modules():
            if prefix.partition(".")[0] == "lora":
                continue
            still = isinstance(module, Router) and module.config.moe_router_bias_update_rate == 0.0
            buffers = {name for name, _ in module.named_buffers(recurse=False)} - module._non_persistent_buffers_set
            trained = {name for name, value in module.named_parameters(recurse=False) if value.requires_grad}
            names += [f"{prefix}.{name}".removeprefix(".") for name in sorted(trained if still else trained | buffers)]
    return names


@contextlib.contextmanager
def without_adapters(chunks: Sequence[Any]) -> Iterator[None]:
    """Context manager in which the chunks compute without their adapters: as the reference policy."""
    adapters = adapters_of(chunks)
    before = [adapter.enabled for adapter in adapters]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter, enabled in zip(adapters, before, strict=True):
            adapter.enabled = enabled
