"""Specs of the layers of a GPT model, with modules of Transformer Engine or of plain PyTorch under the same names."""

from __future__ import annotations

from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from mcontroller.errors import ConfigError
from parallel_state.releases import experts_builder
from workers.model.local_attention import TEDotProductAttention
from workers.model.local_modules import (
    TEColumnParallelGroupedLinear,
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelGroupedLinear,
)


def block_spec(
    config: TransformerConfig, implementation: str, pp_rank: int, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Return the spec of the decoder's layers on one stage of the pipeline, and of its final norm.

    Args:
        config: the configuration of the model.
        implementation: as ``workers.model.gpu_defaults.chosen_implementation`` returns it.
        pp_rank: the stage.
        vp_stage: the virtual stage on it, or None.

    Raises:
        ConfigError: ``moe_layer_freq`` lists another number of layers.
    """
    if implementation == "transformer_engine":
        return gpt_layer_specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=True, qk_l2_norm=config.qk_l2_norm, vp_stage=vp_stage, pp_rank=pp_rank
        )
    specs = [layer_spec(config, with_experts) for with_experts in expert_layers(config)]
    on_stage = [specs[index] for index in layers_of_stage(config, pp_rank, vp_stage)]
    return TransformerBlockSubmodules(layer_specs=on_stage, layer_norm=TENorm)


class LocalProvider(LocalSpecProvider):
    """Layers in plain PyTorch that stand in for Transformer Engine's, for specs of a team's own.

    Megatron's local layers reject sequence and context parallelism and packed rows; these compute them, on a CPU too,
    and have the parameter names of Transformer Engine's. ``block_spec(config, "local", pp_rank, vp_stage)`` builds
    Megatron's GPT layers from them.

    Examples:
        >>> get_mlp_module_spec_for_backend(backend=LocalProvider(), num_experts=8, moe_grouped_gemm=True)
    """

    def fuse_layernorm_and_linear(self) -> bool:
        """Return True: a norm and the linear layer after it are one module."""
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        """Return the class of a norm and the column-parallel linear layer after it."""
        return TELayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, **kwargs: Any) -> type:
        """Return the class of norms; the config chooses RMSNorm or LayerNorm."""
        return TENorm

    def core_attention(self) -> type:
        """Return the class of attention between queries, keys and values."""
        return TEDotProductAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, *args: Any, **kwargs: Any) -> Any:
        """Return what a spec of experts has in the place of their modules; one by one if not grouped."""
        if not moe_use_grouped_gemm:
            return super().grouped_mlp_modules(moe_use_grouped_gemm, *args, **kwargs)
        linears: dict[str, Any] = {
            "linear_fc1": TEColumnParallelGroupedLinear,
            "linear_fc2": TERowParallelGroupedLinear,
        }
        return experts_builder(linears, MLPSubmodules)


def layer_spec(config: TransformerConfig, with_experts: bool) -> ModuleSpec:
    """Return the spec of a transformer layer of plain PyTorch."""
    provider = LocalProvider()
    qk_norm = TENorm if config.qk_layernorm else IdentityOp
    if config.qk_l2_norm:
        qk_norm = L2Norm
    attention = SelfAttentionSubmodules(
        linear_qkv=provider.column_parallel_layer_norm_linear(),
        core_attention=provider.core_attention(),
        linear_proj=provider.row_parallel_linear(),
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    latent = config.multi_latent_attention
    mlp = gpt_layer_specs.get_mlp_module_spec_for_backend(
        backend=provider,
        num_experts=config.num_moe_experts if with_experts else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=TENorm if latent else IdentityOp,
            self_attention=ModuleSpec(
                module=MLASelfAttention if latent else SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=_latent_attention(config, provider) if latent else attention,
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=TENorm if with_experts else IdentityOp,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _latent_attention(config: TransformerConfig, provider: LocalProvider) -> MLASelfAttentionSubmodules:
    """The modules of multi-latent attention as in Megatron's spec for Transformer Engine."""
    up = provider.column_parallel_layer_norm_linear() if config.qk_layernorm else TEColumnParallelLinear
    return MLASelfAttentionSubmodules(
        linear_q_proj=provider.column_parallel_linear(),
        linear_q_down_proj=Linear,  # whole on every rank of tp
        linear_q_up_proj=up,
        linear_kv_down_proj=Linear,
        linear_kv_up_proj=up,
        core_attention=provider.core_attention(),
        linear_proj=provider.row_parallel_linear(),
        q_layernorm=IdentityOp,
        kv_layernorm=IdentityOp,
    )


def expert_layers(config: TransformerConfig) -> list[bool]:
    """Return for every layer of the model whether its feed-forward part is a mixture of experts."""
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    every = config.moe_layer_freq
    if isinstance(every, int):
        return [index % every == 0 for index in range(config.num_layers)]
    if len(every) != config.num_layers:
        raise ConfigError(
            f"model.transformer.moe_layer_freq lists {len(every)} layers, the model has {config.num_layers}",
            key="model.transformer.moe_layer_freq",
            value=every,
        )
    return [bool(flag) for flag in every]


def layers_of_stage(config: TransformerConfig, pp_rank: int, vp_stage: int | None) -> list[int]:
    """Return the layers of one stage, counted from 0 over the whole model."""
    if config.pipeline_model_parallel_layout is not None:
        return config.pipeline_model_parallel_layout.get_layer_id_list(
            layer_type=LayerType.decoder, vp_stage=vp_stage, pp_rank=pp_rank
        )
    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)))
