"""Whether two configurations describe one model, as far as a pass without gradients computes it.

Weights that are equal do not make two models equal: a rollout whose TransformerConfig differs samples from another
policy. So all fields are compared, and the ones that may differ are listed with the reason. A field that is in no list,
such as one of a newer Megatron-Core, must be equal.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from workers.config import ModelConfig, ParallelConfig
from workers.model.transformer_config import transformer_config
from workers.weights.hf.config import read_config
from workers.weights.hf.fields import INERT

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
_UNAVAILABLE = frozenset(" ".join((_COMMUNICATION, _MEMORY, _KERNELS)).split())
"""Fields that Megatron may reject on a machine without a GPU or Transformer Engine."""
_MAY_DIFFER = _UNAVAILABLE | frozenset(" ".join((_LAYOUT, _TRAINING, _INITIAL, _PRECISION)).split())

_OF_WEIGHTS = frozenset(
    ("dtype", "seed", "hf_path", "verify_load", "family", "lora", "freeze", "train_only", "hybrid_layer_pattern")
)
"""Fields of ModelConfig that say which weights there are, how they are trained, under which names they go, and which
class of Megatron's has them."""


def differing_fields(
    first: ModelConfig, second: ModelConfig, of_first: ParallelConfig, of_second: ParallelConfig
) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two models with the same weights compute something else, with both values.

    Args:
        first: a model.
        second: another.
        of_first: its axes.
        of_second: its axes.

    Returns:
        By field of ModelConfig, or ``transformer.<field>`` of TransformerConfig.

    Raises:
        ConfigError: a TransformerConfig cannot be built.
    """
    ours, theirs = _computed(first, of_first), _computed(second, of_second)
    pairs = {name: (ours.get(name), theirs.get(name)) for name in ours | theirs}
    return {name: (one, other) for name, (one, other) in pairs.items() if one != other}


def _computed(model: ModelConfig, parallel: ParallelConfig) -> dict[str, Any]:
    in_transformer = {field.name for field in dataclasses.fields(TransformerConfig)} | {"activation", "transformer"}
    values = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    if model.position_embedding_type != "learned_absolute":  # other positions have no last one
        del values["max_sequence_length"]
    beside = {name: value for name, value in values.items() if name not in in_transformer | _OF_WEIGHTS}
    if model.provider == "bridge":
        return beside | _of_bridge(model)
    kept = {name: value for name, value in model.transformer.items() if name not in _UNAVAILABLE}
    config = transformer_config(dataclasses.replace(model, transformer=kept), parallel)
    built = computed_fields(config)
    keys = {name: name if name in values else f"transformer.{name}" for name in built} | {
        "activation_func": "activation"
    }
    return beside | {keys[name]: value for name, value in built.items()}


def computed_fields(config: TransformerConfig) -> dict[str, Any]:
    """Return the fields of a TransformerConfig that enter a pass without gradients, by name."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if config.activation_func is torch.nn.functional.silu and config.gated_linear_unit:
        del fields["bias_activation_fusion"]  # of SwiGLU the kernel has the same values, of GELU those of tanh
    return {name: value for name, value in fields.items() if name not in _MAY_DIFFER}


def _of_bridge(model: ModelConfig) -> dict[str, Any]:
    """What Megatron-Bridge builds a model from: a file, and the fields that replace what it says."""
    ignored = INERT | {"dtype", "torch_dtype", "quantization_config"}
    config = {key: value for key, value in read_config(str(model.hf_path)).items() if key not in ignored}
    fields = {key: value for key, value in model.transformer.items() if key not in _MAY_DIFFER}
    return {f"config.json {key}": value for key, value in config.items() if key[0] != "_"} | {
        f"transformer.{key}": value for key, value in fields.items()
    }
