"""GLM-4.5, 4.6 and 4.7: grouped queries of which a part is rotated, and experts chosen by scores with a bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from workers.weights.hf.families.qwen2 import Qwen2
from workers.weights.hf.families.qwen3 import Qwen3
from workers.weights.hf.families.routed_by_bias import RoutedByBias
from workers.weights.hf.family import register_model_family
from workers.weights.hf.fields import Field, flag_of


@register_model_family("glm4_moe")
class Glm4Moe(RoutedByBias):
    """GLM-4.5 and GLM-4.5-Air."""

    architecture = "Glm4Moe"
    add_qkv_bias = None
    qk_layernorm = None
    names = Qwen2.names | Qwen3.names | RoutedByBias.names
    keys: ClassVar[Mapping[str, Field]] = {
        **RoutedByBias.keys,
        "attention_bias": Field("add_qkv_bias", flag_of),
        "use_qk_norm": Field("qk_layernorm", flag_of),
    }
    only_built: ClassVar[Mapping[str, tuple[Any, ...]]] = {"hidden_act": ("silu",)}
    fixed: ClassVar[Mapping[str, Any]] = {
        key: value for key, value in RoutedByBias.fixed.items() if key != "rotary_percent"
    }
    rotated = 0.5
    defaults: ClassVar[Mapping[str, Any]] = {
        **RoutedByBias.defaults,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "use_qk_norm": False,
    }
