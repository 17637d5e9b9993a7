"""Checks of low precision: FP8 recipes and the fields that go with them.

Status: run on one H100, except mxfp8.
"""

from __future__ import annotations

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


# By recipe, what the tokens of a product are a multiple of, and those of one rank if sequence parallelism gathers them
# in fp8. Transformer Engine 2.20: assert_dim_for_fp8_exec, which rejects weights of other sizes too, is_quantizable.
_TOKENS = {"delayed": (16, 16), "tensorwise": (16, 16), "blockwise": (16, 128), "mxfp8": (32, 32)}


def token_block(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Return the number that the tokens of a sequence on one rank must be a multiple of, for fp8; 1 without fp8.

    Raises:
        ConfigError: the recipe is not supported.
    """
    if not model.transformer.get("fp8"):
        return 1
    key, recipe = "model.transformer.fp8_recipe", str(model.transformer.get("fp8_recipe", "delayed"))
    if recipe not in _TOKENS:
        text = f"{key} is {recipe!r}, which is not supported: use {', '.join(_TOKENS)}"
        raise ConfigError(text, key=key, value=recipe)
    tokens, gathered = _TOKENS[recipe]
    return gathered if parallel.sequence_parallel else tokens


def check_precision(model: ModelConfig) -> None:
    """Check the fields of low precision; ``token_block`` checks the recipe.

    Raises:
        ConfigError: a field is not supported; ``key`` names it.
    """
    for name, (neutral, why) in _REJECTED.items():
        value = model.transformer.get(name, neutral)
        if value not in (None, neutral):
            key = f"model.transformer.{name}"
            raise ConfigError(f"{key} is {value!r}, which is not supported: {why}", key=key, value=value)
