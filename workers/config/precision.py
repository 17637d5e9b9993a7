"""Checks of low precision: FP8 recipes and the fields that go with them.

Status: run on one H100, except mxfp8.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcontroller.errors import ConfigError
from workers.config.model import ModelConfig
from workers.config.parallel import ParallelConfig

_REJECTED: dict[str, tuple[object, str]] = {
    "fp4": (None, "no part of the training was run with it; use fp8"),
    "fp4_param": (False, "no part of the training was run with it; use fp8"),
    "fp8_param": (
        False,
        "weights move to generation, to checkpoints and to Hugging Face files in model.dtype, so they stay in it",
    ),
    "fp8_wgrad": (True, "Transformer Engine computes all products of a layer in fp8 since 1.8, and ignores the field"),
    "fp8_dot_product_attention": (False, "packed rows and prompts of unequal length have no attention in fp8"),
    "fp8_multi_head_attention": (False, "packed rows and prompts of unequal length have no attention in fp8"),
}


@dataclass(frozen=True)
class _Recipe:
    """Requirements of a recipe of Transformer Engine.

    Attributes:
        tokens: the tokens of a product are a multiple of this.
        gathered_tokens: the same for the tokens of one rank, if sequence parallelism gathers them in fp8.
        channels: both sides of every weight of a rank are a multiple of this.
    """

    tokens: int
    gathered_tokens: int
    channels: int


# Transformer Engine 2.20: assert_dim_for_fp8_exec, and the quantizers' is_quantizable.
_RECIPES = {
    "delayed": _Recipe(16, 16, 16),
    "tensorwise": _Recipe(16, 16, 16),
    "blockwise": _Recipe(16, 128, 16),
    "mxfp8": _Recipe(32, 32, 32),
}


def token_block(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Return the number that the tokens of a sequence on one rank must be a multiple of, for fp8; 1 without fp8."""
    recipe = _recipe_of(model)
    if recipe is None:
        return 1
    return recipe.gathered_tokens if parallel.sequence_parallel else recipe.tokens


def check_precision(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Check the fields of low precision, and that the weights of a rank have the sizes that the recipe needs.

    Raises:
        ConfigError: a field is not supported, or a size is not a multiple; ``key`` names it.
    """
    for name, (neutral, why) in _REJECTED.items():
        value = model.transformer.get(name, neutral)
        if value not in (None, neutral):
            raise _error(f"model.transformer.{name}", value, f"is {value!r}, which is not supported: {why}")
    recipe = _recipe_of(model)
    if recipe is None:
        return
    key = "model.transformer.fp8_recipe"
    for name, size in _sizes(model, parallel).items():
        if size % recipe.channels:
            raise _error(
                name,
                size,
                f"makes weights of {size} channels on a rank; fp8 with {key}={_recipe_name(model)!r} needs multiples "
                f"of {recipe.channels}",
            )


def _recipe_name(model: ModelConfig) -> str:
    return str(model.transformer.get("fp8_recipe", "delayed"))


def _recipe_of(model: ModelConfig) -> _Recipe | None:
    """The recipe of the model's products; None without fp8.

    Raises:
        ConfigError: it is not supported.
    """
    if not model.transformer.get("fp8"):
        return None
    name = _recipe_name(model)
    if name not in _RECIPES:
        text = f"is {name!r}, which is not supported: use {', '.join(_RECIPES)}"
        raise _error("model.transformer.fp8_recipe", name, text)
    return _RECIPES[name]


def _sizes(model: ModelConfig, parallel: ParallelConfig) -> dict[str, int]:
    """Channels of the weights of one rank, by the field that they follow from."""
    width = model.kv_channels or model.hidden_size // model.num_attention_heads
    heads, groups = model.num_attention_heads, model.num_query_groups or model.num_attention_heads
    ffn = model.ffn_hidden_size or 4 * model.hidden_size
    sizes = {
        "model.hidden_size": model.hidden_size,
        "model.num_query_groups": (heads + 2 * groups) * width // parallel.tp,
        "model.num_attention_heads": heads * width // parallel.tp,
    }
    if model.num_moe_experts is None:
        sizes["model.ffn_hidden_size"] = ffn // parallel.tp
    else:
        sizes["model.moe_ffn_hidden_size"] = (model.moe_ffn_hidden_size or ffn) // (parallel.etp or parallel.tp)
    return sizes


def _error(key: str, value: object, text: str) -> ConfigError:
    return ConfigError(f"{key} {text}", key=key, value=value)
