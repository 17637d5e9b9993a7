"""Seed-OSS: Llama with biases of q, k and v, and a separate head width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from workers.weights.hf.families.llama import Llama
from workers.weights.hf.families.qwen2 import Qwen2
from workers.weights.hf.family import register_model_family


@register_model_family("seed_oss")
class SeedOss(Qwen2):
    """Seed-OSS 36B."""

    architecture = "SeedOss"
    defaults: ClassVar[Mapping[str, Any]] = {
        **Llama.defaults,
        "attention_bias": True,
        "head_dim": 128,
        "num_key_value_heads": 8,
    }
    only_built: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu",),
        "attention_bias": (True,),
        "attention_out_bias": (False, None),
    }
    constants: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "attention_bias": True}
    # Of training with transformers, 0.1 in the published files; a model is trained here with its own dropout.
    inert: ClassVar[tuple[str, ...]] = ("attention_dropout", "residual_dropout")

    def config_from(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """As Llama's, with what transformers has another default for."""
        return super().config_from(fields) | {
            "attention_dropout": fields["attention_dropout"],
            "residual_dropout": fields["hidden_dropout"],
        }
