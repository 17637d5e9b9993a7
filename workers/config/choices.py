"""Values that a configuration can take by name."""

from __future__ import annotations

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "IMPLEMENTATIONS",
    "NORMALIZATIONS",
    "POSITION_EMBEDDINGS",
    "ROUTER_REPLAY",
    "VERIFY_WEIGHTS",
]

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "squared_relu", "quick_gelu")
NORMALIZATIONS = ("RMSNorm", "LayerNorm")
POSITION_EMBEDDINGS = ("rope", "learned_absolute", "none")
IMPLEMENTATIONS = ("auto", "transformer_engine", "local")
ROUTER_REPLAY = ("none", "old_log_probs", "rollout")
VERIFY_WEIGHTS = ("auto", "fingerprints", "never")
