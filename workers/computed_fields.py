"""Which fields of a configuration decide what the weights of a model compute, and which change nothing.

Equal weights do not make two models equal: a rollout whose TransformerConfig differs samples from another policy. So
all fields are compared, and the ones that may differ are listed with the reason. A field that is in no list, such as
one of a newer Megatron-Core, must be equal.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from workers.config.model import ModelConfig

_LAYOUT = """
    tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size sequence_parallel
    context_parallel_size hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank cp_comm_type
    expert_model_parallel_size expert_tensor_parallel_size moe_extended_tp microbatch_group_size_per_vp_stage
    num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
"""  # where weights and tokens are
_COMMUNICATION = """
    async_tensor_model_parallel_allreduce barrier_with_L1_time batch_p2p_comm batch_p2p_sync
    deallocate_pipeline_outputs delay_wgrad_compute ep_overlap_early_attn_memory_release moe_deepep_num_sms
    moe_enable_deepep moe_flex_dispatcher_backend moe_hybridep_num_sms moe_shared_expert_overlap
    moe_token_dispatcher_type overlap_p2p_comm overlap_p2p_comm_warmup_flush pipeline_model_parallel_comm_backend
    symmetric_ar_type tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_bootstrap_backend tp_comm_bulk_dgrad
    tp_comm_bulk_wgrad tp_comm_overlap_ag tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv tp_comm_overlap_rs
    tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs use_ring_exchange_p2p variable_seq_lengths
    wgrad_deferral_limit
"""  # how the same values travel, and when
_MEMORY = """
    clone_scatter_output_in_embedding cpu_offloading cpu_offloading_activations cpu_offloading_double_buffering
    cpu_offloading_num_layers cpu_offloading_weights disable_parameter_transpose_cache distribute_saved_activations
    fine_grained_activation_offloading min_offloaded_tensor_size moe_layer_recompute
    num_microbatches_with_partial_activation_checkpoints offload_modules recompute_granularity recompute_method
    recompute_modules recompute_num_layers _cpu_offloading_context
"""  # what is kept, and what is computed again
_KERNELS = """
    apply_rope_fusion attention_backend batch_invariant_mode bias_dropout_fusion deterministic_mode
    fused_single_qkv_rope gradient_accumulation_fusion masked_softmax_fusion memory_efficient_layer_norm
    moe_grouped_gemm moe_permute_fusion moe_router_fusion persist_layer_norm transformer_impl
    use_fused_weighted_squared_relu
"""  # the same operations
_TRAINING = """
    attention_dropout calculate_per_token_loss finalize_model_grads_func grad_scale_func grad_sync_func hidden_dropout
    moe_aux_loss_coeff moe_per_layer_logging moe_router_bias_update_rate moe_z_loss_coeff mtp_loss_scaling_factor
    no_sync_func param_sync_func timers
"""  # nothing without gradients
_INITIAL = """
    embedding_init_method embedding_init_method_std init_method init_method_std output_layer_init_method
    perform_initialization use_cpu_initialization
"""  # weights that are replaced
_PRECISION = """
    autocast_dtype bf16 fp16 params_dtype pipeline_dtype
"""  # of model.dtype, which a user chooses for a rollout: weights are converted
UNAVAILABLE = frozenset(" ".join((_COMMUNICATION, _MEMORY, _KERNELS)).split())
"""Fields that Megatron may reject on a machine without a GPU or Transformer Engine."""
MAY_DIFFER = UNAVAILABLE | frozenset(" ".join((_LAYOUT, _TRAINING, _INITIAL, _PRECISION)).split())
"""Fields of TransformerConfig that change nothing in a pass without gradients, for weights that are given."""

_NOT_OF_INITIAL = """
    lora freeze train_only hf_path dtype transformer_impl max_sequence_length provider verify_load family transformer
    attention_dropout hidden_dropout
"""  # fields of ModelConfig that change neither initial weights nor what they compute

_SAME_SHAPES = """
    normalization layernorm_epsilon layernorm_zero_centered_gamma apply_residual_connection_post_layernorm
    activation_func activation_func_clamp_value glu_linear_offset
    num_attention_heads num_query_groups kv_channels attention_output_gate softmax_scale softmax_type qk_l2_norm
    window_size window_attn_skip_freq linear_attention_freq
    position_embedding_type rotary_base rotary_percent rotary_interleaved rope_scaling_factor no_rope_freq
    rope_type rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
    moe_router_topk moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor
    moe_router_num_groups moe_router_group_topk moe_apply_probs_on_input moe_shared_expert_gate
    mamba_num_heads mamba_head_dim mamba_num_groups mamba_state_dim
"""  # fields with which weights of the same shapes compute something else


def computed_fields(config: TransformerConfig) -> dict[str, Any]:
    """Return the fields of a TransformerConfig that enter a pass without gradients, by name."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if config.activation_func is torch.nn.functional.silu and config.gated_linear_unit:
        del fields["bias_activation_fusion"]  # of SwiGLU the kernel has the same values, of GELU those of tanh
    return {name: value for name, value in fields.items() if name not in MAY_DIFFER}


def initial_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of a model without ``hf_path`` that its initial weights, and what they compute, follow from."""
    ignored = {*_NOT_OF_INITIAL.split(), *([] if model.has_states else ["hybrid_layer_pattern"])}
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    changing_nothing = MAY_DIFFER - {*_INITIAL.split()}
    inside = {name: value for name, value in model.transformer.items() if name not in changing_nothing}
    return {name: value for name, value in fields.items() if name not in ignored} | {"transformer": inside}


def function_of(config: TransformerConfig, model: ModelConfig) -> dict[str, Any]:
    """Return the fields with which weights of the same shapes compute something else, as values of JSON.

    Args:
        config: of the chunks that were built.
        model: has the fields that ``config`` lacks.
    """
    values: dict[str, Any] = {}
    for name in _SAME_SHAPES.split():
        source = config if hasattr(config, name) else model
        if hasattr(source, name):
            values[name] = getattr(source, name)
    text = json.dumps(values, default=lambda value: getattr(value, "__name__", type(value).__name__))
    as_json: dict[str, Any] = json.loads(text)
    return as_json
