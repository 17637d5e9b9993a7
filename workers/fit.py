"""Does this model fit these axes? Arithmetic only: asked before any process starts and before any collective."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcontroller.errors import ConfigError

if TYPE_CHECKING:
    from workers.config import ModelConfig, ParallelConfig

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "squared_relu", "quick_gelu")
POSITION_EMBEDDINGS = ("rope", "learned_absolute", "none")
IMPLEMENTATIONS = ("auto", "transformer_engine", "local")
# Fields of TransformerConfig that split the layers over the stages in the user's own way.
_OWN_SPLIT = (
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)

# Fields of TransformerConfig, the values with which rows can be packed, and what is wrong with others.
_UNPACKED_ONLY: dict[str, tuple[tuple[str, ...], str]] = {
    "moe_token_dispatcher_type": (("alltoall", "flex"), "takes micro-batches of one length; take alltoall"),
    "cuda_graph_impl": (("none",), "replays passes of one length"),
    "enable_cuda_graph": ((), "replays passes of one length"),
    "external_cuda_graph": ((), "replays passes of one length"),
    "fp8": ((), "multiplies blocks of 16 tokens, and packed rows end anywhere"),
}


def check_fit(model: ModelConfig, parallel: ParallelConfig, at: str = "parallel") -> None:
    """Return if the axes can divide the model.

    Args:
        at: where the axes stand in the configuration.

    Raises:
        ConfigError: with the numbers; ``key`` is the field of the model or of the axes that does not fit.
    """
    _check_choices(model)
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


def check_packing(model: ModelConfig) -> None:
    """Return if the rows of a micro-batch can go through the model as one sequence.

    Raises:
        ConfigError: a field of ``model.transformer`` that computes something else then; ``key`` names it.
    """
    balancing = model.transformer.get("moe_router_load_balancing_type", "")
    for name, (harmless, why) in _UNPACKED_ONLY.items():
        value = model.transformer.get(name)
        if value and value not in harmless:
            raise _not_packed(name, value, why)
    if "seq_aux_loss" in ([balancing] if isinstance(balancing, str) else balancing):
        raise _not_packed("moe_router_load_balancing_type", balancing, "needs the rows apart; take aux_loss")


def _not_packed(name: str, value: object, why: str) -> ConfigError:
    key = f"model.transformer.{name}"
    return ConfigError(f"packed rows and {key}={value!r} do not go together: it {why}", key=key, value=value)


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """The least multiple of ``tp`` that holds the vocabulary; the ids above it never get probability."""
    return -(-vocab_size // tp) * tp


def _check_choices(model: ModelConfig) -> None:
    choices = {
        "dtype": DTYPES,
        "activation": ACTIVATIONS,
        "position_embedding_type": POSITION_EMBEDDINGS,
        "transformer_impl": IMPLEMENTATIONS,
        "normalization": ("RMSNorm", "LayerNorm"),
    }
    for name, possible in choices.items():
        value = getattr(model, name)
        if value not in possible:
            key = f"model.{name}"
            raise ConfigError(f"{key} is {value!r}; possible: {', '.join(possible)}", key=key, value=value)


def _check_sizes(model: ModelConfig, parallel: ParallelConfig, at: str) -> None:
    sizes = ("vocab_size", "max_sequence_length", "num_layers", "hidden_size", "num_attention_heads")
    values = {f"model.{name}": getattr(model, name) for name in sizes}
    values |= {f"{at}.{name}": getattr(parallel, name) for name in ("tp", "pp", "cp", "ep")}
    for key, value in values.items():
        if value < 1:
            raise ConfigError(f"{key} is {value}; it must be at least 1", key=key, value=value)
    if parallel.sequence_parallel and parallel.tp == 1:
        raise ConfigError(
            f"{at}.sequence_parallel divides sequences over tp, which is 1: leave it off",
            key=f"{at}.sequence_parallel",
            value=True,
        )
    if parallel.sequence_parallel:
        _divides("model.max_sequence_length", model.max_sequence_length, f"{at}.tp", parallel.tp)


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
    chunks = parallel.pp * (parallel.vpp or 1)
    if model.num_layers % chunks and not any(name in model.transformer for name in _OWN_SPLIT):
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
    if parallel.tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"experts with tp={parallel.tp} need {at}.sequence_parallel=true (Megatron routes each token once)",
            key=f"{at}.sequence_parallel",
            value=False,
        )


def _divides(key: str, value: int, by_key: str, by: int) -> None:
    if value % by:
        text = f"{key} is {value}, which does not divide by {by_key}={by}"
        raise ConfigError(text, key=_blamed(key, by_key), value=value, divisor=by)


def _blamed(key: str, by_key: str) -> str:
    """A model that fits the layout it is trained in is not at fault where it does not fit a second one."""
    return key if by_key.startswith(("model.", "parallel.")) else by_key
