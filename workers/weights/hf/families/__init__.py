"""The built-in model families, each one file. Importing the package registers them, the plainest first."""

from workers.weights.hf.families import (
    deepseek_v3,
    glm4_moe,
    llama,
    mistral,
    mixtral,
    nemotron_h,
    qwen2,
    qwen3,
    qwen3_moe,
    seed_oss,
)

__all__ = [
    "deepseek_v3",
    "glm4_moe",
    "llama",
    "mistral",
    "mixtral",
    "nemotron_h",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
]
