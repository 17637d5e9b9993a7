"""Megatron's HybridModel (megatron-core 0.19 and later), whose layers are the letters of a pattern.

Beside Mamba layers (``M``) each letter is a layer. Without them it is a GPT model: each transformer layer is two
letters, attention (``*``, or ``+`` for multi-latent attention), then an MLP (``-``) or experts (``E``). Both parts have
the number of the transformer layer, so that names of weights, checkpoints and results are those of the GPTModel.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import sharded_state_dict_default
from megatron.core.utils import make_viewless_tensor

from workers.model.local_modules import TENorm
from workers.model.local_spec import LocalProvider, expert_layers, layer_spec, layers_of_stage


def build_hybrid(
    config: TransformerConfig,
    blocks: TransformerBlockSubmodules,
    pg: ProcessGroupCollection,
    *,
    vp_stage: int | None,
    rope_scaling_factor: float | None,
    **arguments: Any,
) -> HybridModel:
    """Return a chunk of a HybridModel that computes what the GPTModel of the same config does, to the bit.

    Args:
        config: of the GPTModel: its layers are pairs of letters.
        blocks: the spec of the GPTModel's layers on this stage (``workers.model.local_spec.block_spec``).
        pg: the groups of the layout.
        vp_stage: the virtual stage, or None.
        rope_scaling_factor: as in ModelConfig.
        arguments: of HybridModel.
    """
    with_experts, on_stage = expert_layers(config), layers_of_stage(config, pg.pp.rank(), vp_stage)
    kinds = [with_experts[index] for index in on_stage]
    submodules = _submodules(config, blocks.layer_specs, kinds, _Part)
    divided = copy.copy(config)  # Megatron rejects these fields beside a pattern with stages
    divided.num_layers_in_first_pipeline_stage = divided.num_layers_in_last_pipeline_stage = None
    chunk = HybridModel(
        config=divided,
        hybrid_stack_spec=ModuleSpec(_Stack, {"norm": blocks.layer_norm}, submodules),
        hybrid_layer_pattern=_pattern(config, pg.pp.size()),
        pg_collection=pg,
        vp_stage=vp_stage,
        **arguments,
    )
    scaled = rope_scaling_factor is not None or config.rotary_interleaved
    if scaled and hasattr(chunk, "rotary_pos_emb"):  # HybridModel has no arguments for these
        chunk.rotary_pos_emb = RotaryEmbedding(
            kv_channels=config.kv_channels,
            rotary_percent=arguments["rotary_percent"],
            rotary_interleaved=config.rotary_interleaved,
            rotary_base=arguments["rotary_base"],
            rope_scaling=rope_scaling_factor is not None,
            rope_scaling_factor=rope_scaling_factor or 1.0,
            use_cpu_initialization=config.use_cpu_initialization,
            cp_group=pg.cp,
        )
    return chunk


def build_with_states(
    config: TransformerConfig,
    letters: str,
    implementation: str,
    pg: ProcessGroupCollection,
    *,
    vp_stage: int | None,
    **arguments: Any,
) -> HybridModel:
    """Return a chunk of a HybridModel of which each letter is a layer, among them Mamba layers.

    Args:
        config: of the model.
        letters: of all layers, without stages.
        implementation: as ``workers.model.gpu_defaults.chosen_implementation`` returns it.
        pg: the groups of the layout.
        vp_stage: the virtual stage, or None.
        arguments: of HybridModel.
    """
    if implementation == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm as Norm
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    else:
        hybrid_stack_spec, Norm = local_stack_spec(config, letters), TENorm
    return HybridModel(
        config=config,
        hybrid_stack_spec=ModuleSpec(_Stack, {"norm": Norm}, hybrid_stack_spec.submodules),
        hybrid_layer_pattern=_with_stages([*letters], config, pg.pp.size()),
        pg_collection=pg,
        vp_stage=vp_stage,
        **arguments,
    )


def _pattern(config: TransformerConfig, stages: int) -> str:
    """Return the letters of the whole model, with ``|`` between the stages of the pipeline."""
    attention = "+" if config.multi_latent_attention else "*"
    layers = [attention + ("E" if with_experts else "-") for with_experts in expert_layers(config)]
    return _with_stages(layers, config, stages)


def _with_stages(layers: Sequence[str], config: TransformerConfig, stages: int) -> str:
    virtual = config.virtual_pipeline_model_parallel_size
    segments = [(rank, stage) for stage in (range(virtual) if virtual else [None]) for rank in range(stages)]
    return "|".join("".join(layers[index] for index in layers_of_stage(config, *segment)) for segment in segments)


def local_stack_spec(config: TransformerConfig, pattern: str = "*-") -> ModuleSpec:
    """Return the spec of a HybridStack in plain PyTorch.

    Args:
        config: of the model; ``deterministic_mode`` computes gated delta nets in PyTorch.
        pattern: letters among ``*``, ``+``, ``-``, ``E``, ``M`` and ``G``; the last two need their modules.
    """
    kinds = [False] if config.num_moe_experts is None else [False, True]
    layers = [layer_spec(config, with_experts) for with_experts in kinds]
    submodules = _submodules(config, layers, kinds, TransformerLayer)
    if "M" in pattern:
        submodules.mamba_layer = _mamba_layer()
    if "G" in pattern:
        submodules.gdn_layer = _delta_net_layer()
    return ModuleSpec(HybridStack, {}, submodules)


def _mamba_layer() -> ModuleSpec:
    # Imported where a pattern has the letter: both modules need packages that other layers do not need.
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules

    provider = LocalProvider()
    linears = MambaMixerSubmodules(provider.column_parallel_layer_norm_linear(), provider.row_parallel_linear())
    mixer = ModuleSpec(MambaMixer, {}, linears)
    return ModuleSpec(MambaLayer, {}, MambaLayerSubmodules(mixer=mixer, mamba_bda=get_bias_dropout_add))


def _delta_net_layer() -> ModuleSpec:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules

    provider = LocalProvider()
    modules = GatedDeltaNetSubmodules(
        in_proj=provider.column_parallel_layer_norm_linear(),
        out_norm=provider.layer_norm(),
        out_proj=provider.row_parallel_linear(),
    )
    attention = TransformerLayerSubmodules(
        self_attention=ModuleSpec(GatedDeltaNet, {}, modules), self_attn_bda=get_bias_dropout_add
    )
    return ModuleSpec(TransformerLayer, {}, attention)


def _submodules(
    config: TransformerConfig, layers: Sequence[ModuleSpec], with_experts: Sequence[bool], module: type
) -> HybridStackSubmodules:
    """Return the specs by kind of letter: the two parts of transformer layers."""
    parts: dict[str, ModuleSpec] = {}
    for layer, has_experts in zip(layers, with_experts, strict=True):
        attention = replace(layer.submodules, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp)
        feed_forward = replace(
            layer.submodules, input_layernorm=IdentityOp, self_attention=IdentityOp, self_attn_bda=IdentityFuncOp
        )
        parts["mla_layer" if config.multi_latent_attention else "attention_layer"] = ModuleSpec(module, {}, attention)
        parts["moe_layer" if has_experts else "mlp_layer"] = ModuleSpec(module, {}, feed_forward)
    return HybridStackSubmodules(**parts)


class _Part(TransformerLayer):
    """Attention or the feed-forward part of a transformer layer; ``layer_number`` is that of the layer."""

    def __init__(self, *args: Any, layer_number: int, pp_layer_offset: int | None = None, **kwargs: Any) -> None:
        first = None if pp_layer_offset is None else pp_layer_offset // 2
        super().__init__(*args, layer_number=(layer_number + 1) // 2, pp_layer_offset=first, **kwargs)


class _Stack(HybridStack):
    """A HybridStack whose final norm and whose tensors in a checkpoint have the names of a GPTModel's."""

    def __init__(self, config: TransformerConfig, *args: Any, norm: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, post_layer_norm=False, **kwargs)
        self.final_layernorm = None
        if self.post_process:
            self.final_layernorm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the hidden states ``[seq, batch, hidden]``, normalized on the last stage."""
        hidden: torch.Tensor = super().forward(*args, **kwargs)
        if self.final_layernorm is None:
            return hidden
        normalized = self.final_layernorm(hidden)
        return make_viewless_tensor(inp=normalized, requires_grad=normalized.requires_grad, keep_graph=True)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return what a GPTModel's TransformerBlock does: equal layers stacked, different ones by their number."""
        apart = self.config.moe_layer_freq not in (0, 1) or self.config.hetereogenous_dist_checkpoint
        apart |= self.config.is_hybrid_model  # letters of other layers
        apart |= any((metadata or {}).get(name) for name in ("non_homogeneous_layers", "singleton_local_shards"))
        state: dict[str, Any] = {}
        for position, layer in enumerate(self.layers):
            local, index = f"{prefix}layers.{position}.", layer.layer_number - 1
            offsets = [] if apart else [(0, index, self.config.num_layers)]
            tensors = layer.sharded_state_dict(local, offsets, metadata)
            replace_prefix_for_sharding(tensors, local, f"{prefix}layers.{index}." if apart else f"{prefix}layers.")
            state |= tensors
        if self.final_layernorm is not None:
            name = f"{prefix}final_layernorm."
            state |= sharded_state_dict_default(self.final_layernorm, name, (), metadata, tp_group=self.tp_group)
        return state
