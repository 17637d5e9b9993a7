"""Checks that a model fits a layout: arithmetic only, before any process starts and before any collective."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from mcontroller.config.checks import check_at_least, check_one_of
from mcontroller.errors import ConfigError
from parallel_state.dry_run.one_layer import CUSTOM_SPLIT
from workers.config.model import ModelConfig
from workers.config.parallel import ParallelConfig
from workers.config.precision import check_precision, token_block
from workers.config.trained_weights import check_trained

# Letters of a hybrid pattern that are not built, and what they need.
_OTHER_LAYERS = {
    "G": "roles build gated delta nets with model.provider=bridge alone; `verify` trains them in any program",
    "D": "sparse attention needs Transformer Engine",
}

# Fields of TransformerConfig, the only supported value, and the reason: with another value Megatron would silently
# compute something else, or fail inside a layer.
_NOT_COMPUTED: dict[str, tuple[object, str]] = {
    "mtp_use_repeated_layer": (False, "each layer of multi-token prediction has its own weights"),
    "mtp_detach_heads": (False, "the loss of multi-token prediction trains the whole model"),
    "mtp_hsm": (False, "the hidden states of multi-token prediction are not mixed"),
    "mtp_hybrid_override_pattern": (None, "set the pattern after / in model.hybrid_layer_pattern"),
    "experimental_attention_variant": (None, "only standard attention is built"),
    "heterogeneous_block_specs": (False, "all layers are built the same; override build_model"),
    "is_hybrid_model": (False, "only attention layers are built; override build_model"),
    "mrope_section": (None, "positions have one dimension"),
    "apply_residual_connection_post_layernorm": (False, "norms are fused with the linear layers after them"),
    "moe_input_jitter_eps": (None, "scores would contain the noise too"),
    "cuda_graph_impl": ("none", "a CUDA graph replays passes of one length, but the lengths of batches differ"),
    "enable_cuda_graph": (False, "a CUDA graph replays passes of one length, but the lengths of batches differ"),
    "external_cuda_graph": (False, "a CUDA graph replays passes of one length, but the lengths of batches differ"),
    "hybrid_context_parallel": (False, "it needs Megatron-LM's own batches"),
    "overlap_moe_expert_parallel_comm": (False, "its schedule needs Megatron-LM's own forward step"),
    "num_microbatches_with_partial_activation_checkpoints": (None, "it needs Megatron-LM's own forward step"),
    "defer_embedding_wgrad_compute": (False, "logits are computed in chunks"),
    "tp_comm_overlap": (False, "Transformer Engine's user buffers are not set up"),
    "use_mup": (False, "logits are computed without its multiplier"),
    "gtp_weight_remat_size": (1, "no process groups are created for it"),
    "expert_gtp_weight_remat_size": (1, "no process groups are created for it"),
    "moe_mlp_glu_interleave_size": (None, "checkpoints and resharding expect the gate before the up projection"),
    "moe_router_force_load_balancing": (False, "tokens would be routed at random, also for scores"),
    "qk_clip": (False, "Megatron-LM's training loop clips the weights, not its layers"),
    "log_max_attention_logit": (False, "Megatron-LM's training loop reads it"),
    "cross_entropy_loss_fusion": (False, "log-probabilities are computed from the logits, not by Megatron's loss"),
    "use_te_rng_tracker": (False, "every layout has Megatron's own random tracker"),
    "inference_rng_tracker": (False, "every layout has Megatron's own random tracker"),
    "init_model_with_meta_device": (False, "weights are initialized on their device"),
    "perform_initialization": (True, "Megatron marks the weights that tp divides while it initializes them"),
    "moe_use_legacy_grouped_gemm": (False, "checkpoints and resharding expect Transformer Engine's grouped weights"),
    "transformer_impl": ("transformer_engine", "set model.transformer_impl"),
    "flash_decode": (False, "generation caches keys after their rotation"),
}
_BIAS_UPDATE_RATE = 1e-3
"""Megatron's default of ``moe_router_bias_update_rate``."""
# Fields of TransformerConfig that only Transformer Engine's layers support, and their neutral values.
_ENGINE_ONLY: dict[str, object] = {
    "window_attn_skip_freq": None,
    "softmax_type": "vanilla",
    "fp8": None,
    "fp32_residual_connection": False,
    "cpu_offloading": False,
    "fine_grained_activation_offloading": False,
    "use_te_activation_func": False,
    "use_kitchen": False,
    "use_kitchen_attention": False,
    "moe_latent_size": None,
    "moe_router_fusion": False,
    "moe_permute_fusion": False,
    "gradient_accumulation_fusion": False,
}
# Values with which experts accept rows of different lengths from the ranks that share them; the first is the default.
_ONE_LENGTH: dict[str, tuple[object, ...]] = {
    "moe_token_dispatcher_type": ("alltoall", "flex"),
    "moe_pad_expert_input_to_capacity": (False,),
}


def check_fit(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Check that the axes can divide the model, and that the model is supported.

    Args:
        model: the model.
        parallel: the axes.

    Raises:
        ConfigError: a field of the model or of the axes does not fit; ``key`` names it.
    """
    _check_choices(model)
    _check_computed(model)
    _check_sizes(model, parallel)
    _check_attention(model, parallel)
    _check_layers(model, parallel)
    _check_pattern(model, parallel)
    _check_prediction(model)
    if model.num_moe_experts is not None:
        _check_experts(model.num_moe_experts, model, parallel)
    elif parallel.ep > 1:
        text = f"parallel.ep is {parallel.ep}, but the model has no experts"
        raise ConfigError(text, key="parallel.ep", value=parallel.ep)
    check_precision(model)
    check_trained(model)


def check_generation(parallel: ParallelConfig) -> None:
    """Raise ConfigError if Megatron cannot generate in this layout: cp is more than 1."""
    if parallel.cp > 1:
        raise ConfigError(
            f"parallel.cp is {parallel.cp}: Megatron generates with cp=1. Generate in a separate group (the section "
            "rollout) or with rollout.engine=vllm, or use a role without rollout",
            key="parallel.cp",
            value=parallel.cp,
        )


def needs_engine(model: ModelConfig, *, on_gpu: bool) -> dict[str, Any]:
    """Return the fields, by their whole keys, whose values only layers of Transformer Engine compute.

    Args:
        model: the model.
        on_gpu: whether it runs on a GPU.
    """
    needing = {
        f"model.transformer.{name}": value
        for name, neutral in _ENGINE_ONLY.items()
        if (value := model.transformer.get(name, neutral)) not in (None, neutral)
    }
    if not on_gpu:  # parallel_state.cpu.megatron supports it
        needing.pop("model.transformer.gradient_accumulation_fusion", None)
    grouped = model.num_moe_experts is not None and model.transformer.get("moe_grouped_gemm", True)
    if grouped and model.add_bias_linear:
        needing["model.add_bias_linear"] = True
    return needing


def check_local(model: ModelConfig, *, on_gpu: bool, counted: Collection[str] = ()) -> None:
    """Check that layers of plain PyTorch can compute the model.

    Args:
        model: the model.
        on_gpu: whether it runs on a GPU.
        counted: fields that are counted and not computed, in a dry run.

    Raises:
        ConfigError: a field needs Transformer Engine; ``key`` names it.
    """
    for key, value in needs_engine(model, on_gpu=on_gpu).items():
        if key.rpartition(".")[2] not in counted:
            raise ConfigError(f"{key}={value!r} needs Transformer Engine: leave it out", key=key, value=value)


def check_packing(model: ModelConfig) -> None:
    """Check that the rows of a micro-batch can be packed into one sequence.

    Raises:
        ConfigError: a field of ``model.transformer`` would compute something else; ``key`` names it.
    """
    if model.has_states:
        raise ConfigError(
            "packed rows and Mamba layers cannot be combined: states would go from row to row; set packed=false",
            key="model.hybrid_layer_pattern",
            value=model.hybrid_layer_pattern,
        )
    dispatcher, supported = model.transformer.get("moe_token_dispatcher_type"), _ONE_LENGTH["moe_token_dispatcher_type"]
    if dispatcher not in (None, *supported):
        raise _not_packed("moe_token_dispatcher_type", dispatcher, "needs micro-batches of one length; use alltoall")
    balancing = model.transformer.get("moe_router_load_balancing_type", "")
    if "seq_aux_loss" in ([balancing] if isinstance(balancing, str) else balancing):
        raise _not_packed("moe_router_load_balancing_type", balancing, "needs separate rows; use aux_loss")


def _not_packed(name: str, value: object, why: str) -> ConfigError:
    key = f"model.transformer.{name}"
    return ConfigError(f"packed rows and {key}={value!r} cannot be combined: it {why}", key=key, value=value)


def length_multiple_of(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Return the number, in tokens, that the length of a sequence must be a multiple of.

    That is two pieces per cp rank, whole tokens on every tp rank with sequence parallelism, and whole blocks of fp8
    products on every rank. Packed rows are aligned one by one, so every sequence of a packed micro-batch is too.
    """
    multiple = 2 * parallel.cp if parallel.cp > 1 else 1
    if parallel.sequence_parallel:
        multiple *= parallel.tp
    ranks = parallel.cp * (parallel.tp if parallel.sequence_parallel else 1)
    return math.lcm(multiple, token_block(model, parallel) * ranks)


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Return the smallest multiple of ``tp`` that is at least the vocabulary size; padded ids have probability 0."""
    return -(-vocab_size // tp) * tp


def _check_choices(model: ModelConfig) -> None:
    choices = {
        "dtype": ("float32", "bfloat16", "float16"),
        "activation": ("silu", "gelu", "gelu_tanh", "relu", "squared_relu", "quick_gelu"),
        "transformer_impl": ("auto", "transformer_engine", "local"),
        "normalization": ("RMSNorm", "LayerNorm"),
    }
    for name, possible in choices.items():
        check_one_of(f"model.{name}", getattr(model, name), possible)


def _check_computed(model: ModelConfig) -> None:
    for name, (neutral, why) in _NOT_COMPUTED.items():
        value = model.transformer.get(name, neutral)
        if value not in (None, neutral):
            key = f"model.transformer.{name}"
            raise ConfigError(f"{key}={value!r} is not supported: {why}", key=key, value=value)
    switches = {
        "moe_": ("model.num_moe_experts", model.num_moe_experts),
        "mtp_": ("model.transformer.mtp_num_layers", model.prediction_layers),
    }
    for name, value in model.transformer.items():
        switch, state = switches.get(name[:4], ("", True))
        key = f"model.transformer.{name}"
        if not state and key != switch:
            text = f"{key} is {value!r}: leave it out; it has no effect without {switch}"
            raise ConfigError(text, key=key, value=value)


def _check_sizes(model: ModelConfig, parallel: ParallelConfig) -> None:
    sizes = ("vocab_size", "max_sequence_length", "num_layers", "hidden_size", "num_attention_heads")
    values = {f"model.{name}": getattr(model, name) for name in sizes}
    values |= {f"parallel.{name}": getattr(parallel, name) for name in ("tp", "pp", "cp", "ep")}
    for key, value in values.items():
        check_at_least(key, value, 1)
    if parallel.sequence_parallel and parallel.tp == 1:
        raise ConfigError(
            "parallel.sequence_parallel divides sequences over tp, which is 1: set it to False",
            key="parallel.sequence_parallel",
            value=True,
        )
    pieces = length_multiple_of(model, parallel)
    if model.position_embedding_type == "learned_absolute" and model.max_sequence_length % pieces:
        raise ConfigError(
            f"model.max_sequence_length is {model.max_sequence_length}, but learned positions end there: it must be a "
            f"multiple of {pieces}, to which parallel.cp={parallel.cp}, parallel.sequence_parallel="
            f"{parallel.sequence_parallel} and fp8 round the length of rows up",
            key="model.max_sequence_length",
            value=model.max_sequence_length,
            divisor=pieces,
        )


def _check_attention(model: ModelConfig, parallel: ParallelConfig) -> None:
    heads, groups = model.num_attention_heads, model.num_query_groups or model.num_attention_heads
    if model.kv_channels is None:
        _divides("model.hidden_size", model.hidden_size, "model.num_attention_heads", heads)
    _divides("model.num_attention_heads", heads, "model.num_query_groups", groups)
    _divides("model.num_attention_heads", heads, "parallel.tp", parallel.tp)
    _divides("model.num_query_groups", groups, "parallel.tp", parallel.tp)
    _divides("model.ffn_hidden_size", model.ffn_hidden_size or 4 * model.hidden_size, "parallel.tp", parallel.tp)
    rotated = int((model.kv_channels or model.hidden_size // heads) * model.rotary_percent)
    if model.position_embedding_type == "rope" and rotated % 2:
        raise ConfigError(
            f"rotary positions rotate pairs of channels, but a head has {rotated} to rotate (hidden_size "
            f"{model.hidden_size}, {heads} heads, rotary_percent {model.rotary_percent}): make it an even number",
            key="model.hidden_size",
            value=model.hidden_size,
        )


def _check_layers(model: ModelConfig, parallel: ParallelConfig) -> None:
    if parallel.vpp is not None and parallel.pp == 1:
        raise ConfigError(
            f"parallel.vpp is {parallel.vpp} with pp=1: chunks interleave the stages of a pipeline; leave vpp out",
            key="parallel.vpp",
            value=parallel.vpp,
        )
    custom = [name for name in CUSTOM_SPLIT if model.transformer.get(name)]
    if custom and parallel.pp == 1:
        key = f"model.transformer.{custom[0]}"
        raise ConfigError(
            f"{key} splits the layers over pipeline stages, but parallel.pp is 1: only the layers of one stage would "
            "be built; leave it out",
            key=key,
            value=model.transformer[custom[0]],
        )
    chunks = parallel.pp * (parallel.vpp or 1)
    if model.num_layers % chunks and not custom:
        raise ConfigError(
            f"model.num_layers is {model.num_layers}, which does not divide by pp={parallel.pp} x "
            f"vpp={parallel.vpp or 1} = {chunks}: take {-(-model.num_layers // chunks) * chunks} layers or another "
            f"parallel.pp",
            key="model.num_layers",
            value=model.num_layers,
        )


def _check_pattern(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Check that a hybrid pattern has the layers that the other fields describe."""
    if (pattern := model.hybrid_layer_pattern) is None:
        return
    key = "model.hybrid_layer_pattern"
    if unknown := [letter for letter in pattern if letter in _OTHER_LAYERS]:
        raise ConfigError(f"{key} is {pattern!r}: {_OTHER_LAYERS[unknown[0]]}; remove them", key=key, value=pattern)
    if model.has_states:
        _check_states(model, parallel, key, pattern.replace("|", ""))
        return
    attention = "+" if model.transformer.get("multi_latent_attention") else "*"
    routed = model.expert_layers if model.num_moe_experts else []
    layers = [attention + ("E" if index in routed else "-") for index in range(model.num_layers)]
    built = "".join(layers) + f"/{layers[-1]}" * model.prediction_layers
    if pattern.replace("|", "") != built:
        raise ConfigError(
            f"{key} is {pattern!r}, but the model has {model.num_layers} layers, {built!r}: change the pattern, or "
            "model.num_layers, model.num_moe_experts, model.transformer.moe_layer_freq and mtp_num_layers",
            key=key,
            value=pattern,
            built=built,
        )


def _check_states(model: ModelConfig, parallel: ParallelConfig, key: str, letters: str) -> None:
    """Check a pattern with Mamba layers, of which each letter is a layer, and that ranks can divide them."""
    if not set(letters) <= set("M*-") or len(letters) != model.num_layers or model.num_moe_experts is not None:
        raise ConfigError(
            f"{key} has {len(letters)} letters, {letters!r}, and the model {model.num_layers} layers and "
            f"num_moe_experts={model.num_moe_experts}: beside Mamba layers M there are attention * and MLPs -, and "
            "each letter is one of model.num_layers",
            key=key,
            value=model.hybrid_layer_pattern,
        )
    without = {
        "model.rope_scaling_factor": model.rope_scaling_factor,
        "model.transformer.rotary_interleaved": model.transformer.get("rotary_interleaved"),
        "model.transformer.multi_latent_attention": model.transformer.get("multi_latent_attention"),
    }
    for name, value in without.items():
        if value:
            raise ConfigError(f"{name} is {value!r}, which is not built beside Mamba layers", key=name, value=value)
    ranks = parallel.tp * parallel.cp
    for name, default in (("mamba_num_heads", None), ("mamba_num_groups", 8)):
        size = model.transformer.get(name, default)
        if not size:
            raise ConfigError(
                f"{key} has Mamba layers: set model.transformer.{name}", key=f"model.transformer.{name}", value=size
            )
        _divides(f"model.transformer.{name}", size, "parallel.tp x cp", ranks)


def _check_prediction(model: ModelConfig) -> None:
    """Check that the layers of multi-token prediction can be built, and trained if that is configured."""
    if "mtp_num_layers" in model.transformer:
        check_at_least("model.transformer.mtp_num_layers", model.prediction_layers, 0)
    if not model.prediction_layers:
        return
    others: dict[str, tuple[Any, str | None]] = {
        f"model.transformer.{name}": (model.transformer.get(name), None) for name in CUSTOM_SPLIT
    }
    if model.trains_prediction:
        others |= {
            "model.tie_embeddings": (model.tie_embeddings, "the last stage has a copy of the embedding beside them"),
            "model.position_embedding_type": (
                model.position_embedding_type == "learned_absolute" and "learned_absolute",
                "the last stage would have a copy of the positions, which Megatron does not keep equal",
            ),
            "model.lora": (model.lora, "their loss would train adapters of other layers alone"),
        }
        of_routers: dict[str, float | None] = {"moe_aux_loss_coeff": None, "moe_z_loss_coeff": None}
        if model.transformer.get("moe_router_enable_expert_bias"):
            of_routers["moe_router_bias_update_rate"] = _BIAS_UPDATE_RATE
        others |= {
            f"model.transformer.{name}": (model.transformer.get(name, default), "their routers would count padding")
            for name, default in of_routers.items()
        }
    for key, (value, why) in others.items():
        if value:
            raise ConfigError(
                f"{key}={value!r} and model.transformer.mtp_num_layers={model.prediction_layers} cannot be combined: "
                f"{why or 'the layers of multi-token prediction are on the last stage'}; leave one of them out, or set "
                "mtp_loss_scaling_factor=0, which keeps the layers as they are",
                key=key,
                value=value,
            )


def _check_experts(experts: int, model: ModelConfig, parallel: ParallelConfig) -> None:
    _divides("model.num_moe_experts", experts, "parallel.ep", parallel.ep)
    width = model.moe_ffn_hidden_size or model.ffn_hidden_size or 4 * model.hidden_size
    _divides("model.moe_ffn_hidden_size", width, "parallel.etp", parallel.etp or parallel.tp)
    if model.moe_router_topk > experts:
        raise ConfigError(
            f"model.moe_router_topk is {model.moe_router_topk}, more than the {experts} experts",
            key="model.moe_router_topk",
            value=model.moe_router_topk,
        )
    _check_dispatch(model, parallel)
    _check_capacity(experts, model)
    balancing = model.transformer.get("moe_router_load_balancing_type")
    if balancing == "sinkhorn":
        key = "model.transformer.moe_router_load_balancing_type"
        raise ConfigError(
            f"{key} is 'sinkhorn', which routes a token by the other tokens of its micro-batch, and differently for "
            "scores than in training: use aux_loss, seq_aux_loss, global_aux_loss or none",
            key=key,
            value=balancing,
        )
    if parallel.tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"experts with tp={parallel.tp} need parallel.sequence_parallel=true (Megatron routes each token once)",
            key="parallel.sequence_parallel",
            value=False,
        )


def _check_capacity(experts: int, model: ModelConfig) -> None:
    """Check that experts never drop tokens.

    Which tokens are dropped depends on the other tokens of a micro-batch, so sampling, scoring and training would use
    different policies.
    """
    key = "model.transformer.moe_expert_capacity_factor"
    factor, enough = model.transformer.get("moe_expert_capacity_factor"), experts / model.moe_router_topk
    if isinstance(factor, int | float) and factor < enough:
        raise ConfigError(
            f"{key} is {factor}: experts would drop tokens depending on the other tokens of a micro-batch, differently "
            f"for scores than for samples; leave it out, or set {enough:g}, with which {experts} experts drop none",
            key=key,
            value=factor,
        )


def _check_dispatch(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Check that experts accept rows of different lengths: each rank's batch is as wide as its own longest row."""
    etp = parallel.etp or parallel.tp
    if parallel.ep == 1 and etp == parallel.tp:
        return
    for name, supported in _ONE_LENGTH.items():
        value = model.transformer.get(name, supported[0])
        if value not in supported:
            key = f"model.transformer.{name}"
            raise ConfigError(
                f"{key}={value!r} needs equally many tokens from every rank that shares experts, but with parallel.ep="
                f"{parallel.ep}, etp={etp}, tp={parallel.tp} their rows differ; use {supported[0]!r}",
                key=key,
                value=value,
            )


def _divides(key: str, value: int, by_key: str, by: int) -> None:
    if value % by:
        text = f"{key} is {value}, which does not divide by {by_key}={by}"
        raise ConfigError(text, key=key, value=value, divisor=by)
