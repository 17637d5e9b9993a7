"""Norms and linear layers in plain PyTorch with the parameter names, and the class names, of Transformer Engine's.

Checkpoints, conversions and transfers use these names: a model built from these modules and one built from Transformer
Engine's are the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint

from mcontroller.errors import ConfigError
from parallel_state.dry_run import transformer_engine


class TENorm(torch.nn.Module):
    """RMSNorm or LayerNorm, by ``config.normalization``, over the last dim; replicated over tp."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **engine_only: Any) -> None:
        super().__init__()
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.eps = eps
        self.weight = _norm_parameter(config, hidden_size, 0.0 if self.zero_centered else 1.0)
        self.bias = _norm_parameter(config, hidden_size, 0.0) if config.normalization == "LayerNorm" else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``hidden`` ``[..., hidden_size]``, normalized."""
        return _normalized(hidden, self.weight, self.bias, self.eps, self.zero_centered)


class TEColumnParallelLinear(ColumnParallelLinear):
    """A column-parallel linear layer of any input: Megatron's gathers a sequence that must be contiguous."""

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output for ``hidden`` ``[seq, batch, input_size]``."""
        return super().forward(hidden.contiguous(), *args, **kwargs)


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """A norm and the column-parallel linear layer after it, in one module."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = _norm_parameter(config, input_size, 0.0 if self.zero_centered else 1.0)
        has_bias = config.normalization == "LayerNorm"
        self.layer_norm_bias = _norm_parameter(config, input_size, 0.0) if has_bias else None

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the linear layer's output for the normalized ``hidden`` ``[seq, batch, input_size]``."""
        normalized = _normalized(hidden, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centered)
        return super().forward(normalized, *args, **kwargs)


class GatedMLP(MLP):
    """Megatron's MLP with fewer passes over the activation of gated units without offset and clamp.

    Megatron adds the offset even if it is 0. Without gradients, the activation overwrites the output of the first
    linear layer: on a CPU, new memory costs as much as a pass.
    """

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output ``[seq, batch, hidden]`` and the bias of the second linear layer, as in Megatron."""
        if per_token_scale is not None or not _only_gated(self.config):
            return super().forward(hidden_states, per_token_scale, **kwargs)
        both, bias = self.linear_fc1(hidden_states)
        if bias is not None:
            both = both + bias
        if torch.is_grad_enabled() and self.config.activation_func is torch.nn.functional.silu:
            return self.linear_fc2(_SwiGLU.apply(both))
        gate, linear = both.chunk(2, dim=-1)
        if torch.is_grad_enabled():
            return self.linear_fc2(self.config.activation_func(gate) * linear)
        activated = _activated(gate, self.config)
        if len(hidden_states) == 1:  # a step of generation: contiguous, as the layer needs it
            return self.linear_fc2(activated * linear)
        return self.linear_fc2(activated.mul_(linear))


def use_gated_mlps(chunk: torch.nn.Module) -> None:
    """Change the class of the dense MLPs of a chunk to ``GatedMLP``.

    They must be built as Megatron's own class, because its layers pass groups only to that (0.16).
    """
    for module in chunk.modules():
        if type(module) is MLP:
            module.__class__ = GatedMLP


def _only_gated(config: TransformerConfig) -> bool:
    """Whether the MLP computes no more than the activation of the first half times the second half."""
    return (
        config.gated_linear_unit
        and not config.bias_activation_fusion
        and not config.use_te_activation_func
        and not getattr(config, "glu_linear_offset", 0.0)
        and getattr(config, "activation_func_clamp_value", None) is None
    )


def _activated(gate: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    """The activation of ``gate``, which it may overwrite."""
    if config.activation_func is torch.nn.functional.silu:
        return torch.nn.functional.silu(gate, inplace=True)
    return config.activation_func(gate)


class _SwiGLU(torch.autograd.Function):
    """``silu`` of the first half times the second half, whose gradients are written into one tensor.

    Autograd computes the same values, keeps the activation for the backward pass, and concatenates the gradients of
    the halves.
    """

    @staticmethod
    def forward(context: Any, both: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(both)
        gate, linear = both.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate).mul_(linear)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (gradient,), (both,) = gradients, context.saved_tensors
        gate, linear = both.chunk(2, dim=-1)
        result = torch.empty_like(both)
        of_gate, of_linear = result.chunk(2, dim=-1)
        torch.mul(gradient, torch.nn.functional.silu(gate), out=of_linear)
        torch.ops.aten.silu_backward.grad_input(gradient * linear, gate, grad_input=of_gate)
        return result


def _norm_parameter(config: TransformerConfig, size: int, value: float) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(
        torch.full((size,), value, dtype=config.params_dtype, device=torch.cuda.current_device())
    )
    # Megatron sums the gradients of parameters with this attribute over tp, whose ranks have different tokens.
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter


def _normalized(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, zero_centered: bool
) -> torch.Tensor:
    scale = weight + 1 if zero_centered else weight
    if bias is None and hidden.device.type == "cpu" and hidden.dtype == scale.dtype == torch.float32:
        output: torch.Tensor = _RMSNorm.apply(hidden, scale, eps)
        return output
    if bias is None:
        return torch.nn.functional.rms_norm(hidden, scale.shape, scale, eps)
    return torch.nn.functional.layer_norm(hidden, scale.shape, scale, bias, eps)


class _RMSNorm(torch.autograd.Function):
    """``torch.nn.functional.rms_norm`` with half of its passes over memory: torch has no kernel for it on a CPU."""

    @staticmethod
    def forward(context: Any, hidden: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        inverse = norm.square_().div_(hidden.size(-1)).add_(eps).rsqrt_()
        context.save_for_backward(hidden, inverse, scale)
        return (hidden * inverse).mul_(scale)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (gradient,), (hidden, inverse, scale) = gradients, context.saved_tensors
        normalized = hidden * inverse
        products = (gradient * normalized).flatten(0, -2)
        mean = torch.mv(products, scale).div_(hidden.size(-1)).view(inverse.shape)
        result = (gradient * scale).addcmul_(normalized, mean, value=-1).mul_(inverse)
        return result, products.sum(0), None


class _GroupedLinear(torch.nn.Module):
    """One linear layer for each local expert, with parameters ``weight0``, ``weight1``, ...

    The parameters are divided over etp along dim ``split_dim``. The layer does not communicate: the token dispatcher
    does.
    """

    split_dim: int

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool,
        pg_collection: ProcessGroupCollection,
        **engine_only: Any,
    ) -> None:
        super().__init__()
        if bias:
            raise ConfigError(
                "experts with biases need Transformer Engine: set model.add_bias_linear=false",
                key="model.add_bias_linear",
                value=True,
            )
        self.num_gemms = num_gemms
        self.groups = pg_collection
        etp = pg_collection.expt_tp.size()
        shape = [output_size, input_size]
        shape[self.split_dim] //= etp
        own_groups = config.expert_model_parallel_size > 1 or etp != config.tensor_model_parallel_size
        pieces = 2 if self.split_dim == 0 and config.gated_linear_unit else 1
        for index in range(num_gemms):
            weight = torch.empty(shape, dtype=config.params_dtype, device=torch.cuda.current_device())
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                init_method(weight)
            parameter = torch.nn.Parameter(weight)
            parameter.allreduce = not own_groups  # type: ignore[attr-defined]  # over the dense dp, or the experts'
            set_tensor_model_parallel_attributes(parameter, True, self.split_dim, pieces)
            self.register_parameter(f"weight{index}", parameter)

    def forward(self, tokens: torch.Tensor, tokens_per_expert: Sequence[int]) -> tuple[torch.Tensor, None]:
        """Return ``[tokens, output]`` of ``[tokens, input]``; tokens are sorted by expert."""
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        if transformer_engine.is_counted(tokens):
            return transformer_engine.grouped_linear(tokens, weights), None
        parts = torch.split(tokens, [int(count) for count in tokens_per_expert])
        outputs = [torch.nn.functional.linear(part, weight) for part, weight in zip(parts, weights, strict=True)]
        return torch.cat(outputs), None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the same as Megatron's for Transformer Engine: experts are one more dim, or one key each."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        first = self.groups.ep.rank() * self.num_gemms
        experts = self.groups.ep.size() * self.num_gemms
        sharded = {}
        for index in range(self.num_gemms):
            one_by_one = metadata.get("singleton_local_shards", False)
            offset = (len(sharded_offsets), first + index, experts)
            tensors = make_sharded_tensors_for_checkpoint(
                {f"{index}.weight": getattr(self, f"weight{index}")},
                "",
                {f"{index}.weight": self.split_dim},
                sharded_offsets if one_by_one else (*sharded_offsets, offset),
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(tensors, f"{index}.", f"{first + index}.{prefix}" if one_by_one else prefix)
            tensor = tensors[f"{index}.weight"]
            tensor.replica_id = (*tensor.replica_id[:2], self.groups.expt_dp.rank())
            sharded[f"{prefix}weight{index}"] = tensor
        return sharded


class TEColumnParallelGroupedLinear(_GroupedLinear):
    """The first linear layers of experts, divided along the output."""

    split_dim = 0


class TERowParallelGroupedLinear(_GroupedLinear):
    """The second linear layers of experts, divided along the input."""

    split_dim = 1
