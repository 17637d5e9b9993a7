"""The built-in model families, each one file. Importing the package registers them, the plainest first."""

from workers.weights.hf.families import llama, qwen2, qwen3, qwen3_moe

__all__ = ["llama", "qwen2", "qwen3", "qwen3_moe"]
