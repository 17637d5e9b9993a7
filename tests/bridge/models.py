"""The models of the tests of Megatron-Bridge: without and with layers of Transformer Engine."""

from __future__ import annotations

import sys

from tests.workers.weights.hf_models import LATENT, MODELS, QWEN_MOE, SIZES, SP, Model

WITH_ENGINE = "with_transformer_engine" in sys.modules
BRIDGE = {"provider": "bridge"}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
# Megatron's gated delta net in PyTorch.
OF_DELTA = BRIDGE | {"transformer": {"deterministic_mode": True}}
GEMMA3 = SIZES | {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "sliding_window": 4,
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": True,
}

PLAIN = {
    name: MODELS[name]._replace(settings=BRIDGE)
    for name in ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "glm4_moe")
} | {"deepseek_v3": Model("DeepseekV3", SIZES | LATENT | {"rms_norm_eps": 1e-6}, BRIDGE)}
"""Computed by local layers where there is no Transformer Engine."""

ENGINE = {
    "gemma3": Model("Gemma3Text", GEMMA3, BRIDGE, generates=False),
    "gpt_oss": Model(
        "GptOss",
        SIZES
        | {"intermediate_size": 24, "head_dim": 16, "sliding_window": 4}
        | {"num_local_experts": 4, "num_experts_per_tok": 2},
        BRIDGE,
        generates=False,
    ),
    "qwen3_next": Model(
        "Qwen3Next",
        SIZES | QWEN_MOE | DELTA | {"shared_expert_intermediate_size": 32, "norm_topk_prob": True},
        OF_DELTA,
        generates=False,
    ),
    "qwen3_5": Model("Qwen3_5Text", SIZES | DELTA | {"head_dim": 16}, OF_DELTA, generates=False),
}
"""Computed by Bridge's own layers, which need Transformer Engine, or the stand-in for it."""

MATRIX = ENGINE | {name: PLAIN[name] for name in ("llama", "qwen3_moe")} if WITH_ENGINE else PLAIN
ADAPTED = {name: ENGINE[name] for name in ("gemma3", "gpt_oss")} if WITH_ENGINE else PLAIN
"""The models whose linear layers can have adapters."""
EXPERTS = ("qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss", "qwen3_next")
DENSE_LAYOUT, EXPERT_LAYOUT = SP | {"pp": 2}, SP | {"pp": 2, "ep": 2, "etp": 1}
LAYOUTS = {"one process": {}, "TP2 x PP2 with SP": DENSE_LAYOUT, "TP2 x PP2 x EP2 with SP": EXPERT_LAYOUT}


def layouts_of(name: str) -> tuple[str, str]:
    """The layouts of a model's row: one process, and every axis that it has."""
    return "one process", "TP2 x PP2 x EP2 with SP" if name in EXPERTS else "TP2 x PP2 with SP"
