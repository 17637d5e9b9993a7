"""Does this model fit these axes? Arithmetic only: asked before any process starts and before any collective."""

from __future__ import annotations

import dataclasses
import math

from mcontroller.config_checks import check_at_least, check_one_of
from mcontroller.errors import ConfigError
from workers.config.choices import ACTIVATIONS, DTYPES, IMPLEMENTATIONS, NORMALIZATIONS, POSITION_EMBEDDINGS
from workers.config.model import ModelConfig
from workers.config.parallel import ParallelConfig

__all__ = [
    "check_fit",
    "check_generation",
    "check_local",
    "check_packing",
    "divided_for",
    "length_multiple_of",
    "padded_vocab_size",
]

# Fields of TransformerConfig that split the layers over the stages in the user's own way.
_OWN_SPLIT = (
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)

# Fields of TransformerConfig, the value with which each is taken, and why no other is: Megatron would go on without a
# word and compute something else, or fail inside a layer.
_NOT_COMPUTED: dict[str, tuple[object, str]] = {
    "multi_latent_attention": (False, "its sizes are not fields of TransformerConfig; give the model by build_model"),
    "mtp_num_layers": (None, "multi-token prediction would be built without its loss; give the model by build_model"),
    "experimental_attention_variant": (None, "the layers are of standard attention"),
    "heterogeneous_block_specs": (False, "all layers are built alike; give the model by build_model"),
    "is_hybrid_model": (False, "there are layers of attention only; give the model by build_model"),
    "mrope_section": (None, "positions have one dim"),
    "apply_residual_connection_post_layernorm": (False, "norms are fused with the linears after them"),
    "moe_input_jitter_eps": (None, "the noise would be in scores as well"),
    "cuda_graph_impl": ("none", "a CUDA graph replays passes of one length, and batches differ"),
    "enable_cuda_graph": (False, "a CUDA graph replays passes of one length, and batches differ"),
    "external_cuda_graph": (False, "a CUDA graph replays passes of one length, and batches differ"),
    "hybrid_context_parallel": (False, "it takes batches of Megatron-LM's own"),
    "overlap_moe_expert_parallel_comm": (False, "its schedule takes a forward step of Megatron-LM's own"),
    "defer_embedding_wgrad_compute": (False, "logits are made in chunks"),
    "tp_comm_overlap": (False, "nothing here sets up Transformer Engine's user buffers"),
    "use_mup": (False, "logits are made without its multiplier"),
    "gtp_weight_remat_size": (1, "no groups are made for it"),
    "expert_gtp_weight_remat_size": (1, "no groups are made for it"),
    "moe_mlp_glu_interleave_size": (None, "checkpoints and refits know gate and up one after the other"),
    "moe_router_force_load_balancing": (False, "tokens would be routed at random, in scores as well"),
    "flash_decode": (False, "generation rotates keys before it caches them"),
}
# Those that only Transformer Engine's layers compute; for attention's see workers.model.local_attention.
_ENGINE_ONLY: dict[str, object] = {
    "fp8": None,
    "fp4": None,
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
# With which experts on ranks that hold different rows take micro-batches of one length only.
_ONE_LENGTH: dict[str, tuple[object, ...]] = {
    "moe_token_dispatcher_type": ("alltoall", "flex"),
    "moe_pad_expert_input_to_capacity": (False,),
}
# Fields of TransformerConfig, the values with which rows can be packed, and what is wrong with others.
_UNPACKED_ONLY: dict[str, tuple[tuple[object, ...], str]] = {
    "moe_token_dispatcher_type": (("alltoall", "flex"), "takes micro-batches of one length; take alltoall"),
    "fp8": ((None,), "multiplies blocks of 16 tokens, and packed rows end anywhere"),
}


def check_fit(model: ModelConfig, parallel: ParallelConfig, at: str = "parallel") -> None:
    """Return if the axes can divide the model.

    Args:
        at: where the axes stand in the configuration.

    Raises:
        ConfigError: with the numbers; ``key`` is the field of the model or of the axes that does not fit.
    """
    _check_choices(model)
    _check_computed(model)
    _check_sizes(model, parallel, at)
    _check_attention(model, parallel, at)
    _check_layers(model, parallel, at)
    if model.num_moe_experts is not None:
        _check_experts(model.num_moe_experts, model, parallel, at)
    elif parallel.ep > 1:
        text = f"{at}.ep is {parallel.ep}, but the model has no experts"
        raise ConfigError(text, key=f"{at}.ep", value=parallel.ep)


def check_generation(parallel: ParallelConfig, at: str) -> None:
    """Return if Megatron can generate in this layout; ConfigError over the cp axis."""
    if parallel.cp > 1:
        raise ConfigError(
            f"{at}.cp is {parallel.cp}: generation runs with cp=1; give the rollout a layout of its own with "
            "rollout.parallel, or take a role without rollout",
            key=f"{at}.cp",
            value=parallel.cp,
        )


def divided_for(model: ModelConfig, parallel: ParallelConfig, training: ParallelConfig) -> ModelConfig:
    """The model for axes other than those of training: a split of layers over stages is for the stages of training."""
    if (parallel.pp, parallel.vpp) == (training.pp, training.vpp):
        return model
    further = {name: value for name, value in model.transformer.items() if name not in _OWN_SPLIT}
    return dataclasses.replace(model, transformer=further)


def check_local(model: ModelConfig, *, on_gpu: bool) -> None:
    """Return if layers of plain PyTorch compute the model; ConfigError over a field that Transformer Engine does."""
    for name, neutral in _ENGINE_ONLY.items():
        if name == "gradient_accumulation_fusion" and not on_gpu:
            continue  # parallel_state.cpu.megatron has what it takes
        value = model.transformer.get(name, neutral)
        if value not in (None, neutral):
            key = f"model.transformer.{name}"
            raise ConfigError(
                f"{key}={value!r} needs Transformer Engine; local layers compute {name}={neutral!r} only",
                key=key,
                value=value,
            )


def check_packing(model: ModelConfig) -> None:
    """Return if the rows of a micro-batch can go through the model as one sequence.

    Raises:
        ConfigError: a field of ``model.transformer`` that computes something else then; ``key`` names it.
    """
    balancing = model.transformer.get("moe_router_load_balancing_type", "")
    for name, (harmless, why) in _UNPACKED_ONLY.items():
        value = model.transformer.get(name, harmless[0])
        if value not in harmless:
            raise _not_packed(name, value, why)
    if "seq_aux_loss" in ([balancing] if isinstance(balancing, str) else balancing):
        raise _not_packed("moe_router_load_balancing_type", balancing, "needs the rows apart; take aux_loss")


def _not_packed(name: str, value: object, why: str) -> ConfigError:
    key = f"model.transformer.{name}"
    return ConfigError(f"packed rows and {key}={value!r} do not go together: it {why}", key=key, value=value)


def length_multiple_of(model: ModelConfig, parallel: ParallelConfig) -> int:
    """What the length of a sequence must be a multiple of: two pieces a cp rank, whole tokens on every tp rank under
    sequence parallelism, and on every rank the blocks in which fp8 is multiplied.
    """
    multiple = 2 * parallel.cp if parallel.cp > 1 else 1
    if parallel.sequence_parallel:
        multiple *= parallel.tp
    if model.transformer.get("fp8"):
        block = 32 if model.transformer.get("fp8_recipe") == "mxfp8" else 16
        multiple = math.lcm(multiple, block * parallel.cp)
    return multiple


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """The least multiple of ``tp`` that holds the vocabulary; the ids above it never get probability."""
    return -(-vocab_size // tp) * tp


def _check_choices(model: ModelConfig) -> None:
    choices = {
        "dtype": DTYPES,
        "activation": ACTIVATIONS,
        "position_embedding_type": POSITION_EMBEDDINGS,
        "transformer_impl": IMPLEMENTATIONS,
        "normalization": NORMALIZATIONS,
    }
    for name, possible in choices.items():
        check_one_of(f"model.{name}", getattr(model, name), possible)


def _check_computed(model: ModelConfig) -> None:
    for name, (neutral, why) in _NOT_COMPUTED.items():
        value = model.transformer.get(name, neutral)
        if value not in (None, neutral):
            key = f"model.transformer.{name}"
            raise ConfigError(f"{key}={value!r} is not computed here: {why}", key=key, value=value)


def _check_sizes(model: ModelConfig, parallel: ParallelConfig, at: str) -> None:
    sizes = ("vocab_size", "max_sequence_length", "num_layers", "hidden_size", "num_attention_heads")
    values = {f"model.{name}": getattr(model, name) for name in sizes}
    values |= {f"{at}.{name}": getattr(parallel, name) for name in ("tp", "pp", "cp", "ep")}
    for key, value in values.items():
        check_at_least(key, value, 1)
    if parallel.sequence_parallel and parallel.tp == 1:
        raise ConfigError(
            f"{at}.sequence_parallel divides sequences over tp, which is 1: leave it off",
            key=f"{at}.sequence_parallel",
            value=True,
        )
    if parallel.sequence_parallel:
        _divides("model.max_sequence_length", model.max_sequence_length, f"{at}.tp", parallel.tp)
    pieces = length_multiple_of(model, parallel)
    if model.position_embedding_type == "learned_absolute" and model.max_sequence_length % pieces:
        raise ConfigError(
            f"model.max_sequence_length is {model.max_sequence_length}, and there are no learned positions beyond: it "
            f"must be a multiple of {pieces}, to which {at} ({at}.cp={parallel.cp}, {at}.sequence_parallel="
            f"{parallel.sequence_parallel}) and fp8 round the length of rows up",
            key=_blamed("model.max_sequence_length", f"{at}.cp"),
            value=model.max_sequence_length,
            divisor=pieces,
        )


def _check_attention(model: ModelConfig, parallel: ParallelConfig, at: str) -> None:
    heads, groups = model.num_attention_heads, model.num_query_groups or model.num_attention_heads
    if model.kv_channels is None:
        _divides("model.hidden_size", model.hidden_size, "model.num_attention_heads", heads)
    _divides("model.num_attention_heads", heads, "model.num_query_groups", groups)
    _divides("model.num_attention_heads", heads, f"{at}.tp", parallel.tp)
    _divides("model.num_query_groups", groups, f"{at}.tp", parallel.tp)
    _divides("model.ffn_hidden_size", model.ffn_hidden_size or 4 * model.hidden_size, f"{at}.tp", parallel.tp)
    rotated = int((model.kv_channels or model.hidden_size // heads) * model.rotary_percent)
    if model.position_embedding_type == "rope" and rotated % 2:
        raise ConfigError(
            f"rotary positions turn pairs of channels, and a head has {rotated} to turn (hidden_size "
            f"{model.hidden_size}, {heads} heads, rotary_percent {model.rotary_percent}): make it an even number",
            key="model.hidden_size",
            value=model.hidden_size,
        )


def _check_layers(model: ModelConfig, parallel: ParallelConfig, at: str) -> None:
    if parallel.vpp is not None and parallel.pp == 1:
        raise ConfigError(
            f"{at}.vpp is {parallel.vpp} with pp=1: chunks interleave stages of a pipeline; leave vpp out",
            key=f"{at}.vpp",
            value=parallel.vpp,
        )
    own = [name for name in _OWN_SPLIT if model.transformer.get(name)]
    if own and parallel.pp == 1:
        key = f"model.transformer.{own[0]}"
        raise ConfigError(
            f"{key} splits the layers over the stages of a pipeline, and {at}.pp is 1, which would be left with those "
            "of one stage: leave it out",
            key=key,
            value=model.transformer[own[0]],
        )
    chunks = parallel.pp * (parallel.vpp or 1)
    if model.num_layers % chunks and not own:
        raise ConfigError(
            f"model.num_layers is {model.num_layers}, which does not divide by pp={parallel.pp} x "
            f"vpp={parallel.vpp or 1} = {chunks}: take {-(-model.num_layers // chunks) * chunks} layers or another "
            f"{at}.pp",
            key=_blamed("model.num_layers", f"{at}.pp"),
            value=model.num_layers,
        )


def _check_experts(experts: int, model: ModelConfig, parallel: ParallelConfig, at: str) -> None:
    _divides("model.num_moe_experts", experts, f"{at}.ep", parallel.ep)
    width = model.moe_ffn_hidden_size or model.ffn_hidden_size or 4 * model.hidden_size
    _divides("model.moe_ffn_hidden_size", width, f"{at}.etp", parallel.etp or parallel.tp)
    if model.moe_router_topk > experts:
        raise ConfigError(
            f"model.moe_router_topk is {model.moe_router_topk}, more than the {experts} experts",
            key="model.moe_router_topk",
            value=model.moe_router_topk,
        )
    _check_dispatch(model, parallel, at)
    _check_capacity(experts, model)
    balancing = model.transformer.get("moe_router_load_balancing_type")
    if balancing == "sinkhorn":
        key = "model.transformer.moe_router_load_balancing_type"
        raise ConfigError(
            f"{key} is 'sinkhorn', which routes by whatever else is in a micro-batch, and in scores otherwise than in "
            "training: take aux_loss, seq_aux_loss, global_aux_loss or none",
            key=key,
            value=balancing,
        )
    if parallel.tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"experts with tp={parallel.tp} need {at}.sequence_parallel=true (Megatron routes each token once)",
            key=f"{at}.sequence_parallel",
            value=False,
        )


def _check_capacity(experts: int, model: ModelConfig) -> None:
    """A token that an expert has no room for would be left out by whatever else is in its micro-batch: the sampler,
    which takes one token of a row at a time, and each of the scores would be other policies.
    """
    key = "model.transformer.moe_expert_capacity_factor"
    factor, enough = model.transformer.get("moe_expert_capacity_factor"), experts / model.moe_router_topk
    if isinstance(factor, int | float) and factor < enough:
        raise ConfigError(
            f"{key} is {factor}: experts would leave tokens out by what else is in a micro-batch, in scores otherwise "
            f"than in samples; leave it out, or take {enough:g}, with which all {experts} experts have room for all",
            key=key,
            value=factor,
        )


def _check_dispatch(model: ModelConfig, parallel: ParallelConfig, at: str) -> None:
    """Rows of different ranks differ in length, padded ones as well: each batch is as wide as its own longest row."""
    etp = parallel.etp or parallel.tp
    if parallel.ep == 1 and etp == parallel.tp:
        return
    for name, harmless in _ONE_LENGTH.items():
        value = model.transformer.get(name, harmless[0])
        if value not in harmless:
            key = f"model.transformer.{name}"
            raise ConfigError(
                f"{key}={value!r} takes equally many tokens from every rank that shares experts, and with {at}.ep="
                f"{parallel.ep}, etp={etp}, tp={parallel.tp} these hold different rows; take {harmless[0]!r}",
                key=key,
                value=value,
            )


def _divides(key: str, value: int, by_key: str, by: int) -> None:
    if value % by:
        text = f"{key} is {value}, which does not divide by {by_key}={by}"
        raise ConfigError(text, key=_blamed(key, by_key), value=value, divisor=by)


def _blamed(key: str, by_key: str) -> str:
    """A model that fits the layout it is trained in is not at fault where it does not fit a second one."""
    return key if by_key.startswith(("model.", "parallel.")) else by_key
