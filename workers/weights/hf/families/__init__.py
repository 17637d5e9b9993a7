"""The built-in model families, each one file. Importing the package registers them."""
# ruff: noqa: F401

import workers.weights.hf.families.deepseek_v3
import workers.weights.hf.families.glm4_moe
import workers.weights.hf.families.llama
import workers.weights.hf.families.mistral
import workers.weights.hf.families.mixtral
import workers.weights.hf.families.nemotron_h
import workers.weights.hf.families.qwen2
import workers.weights.hf.families.qwen3
import workers.weights.hf.families.qwen3_moe
import workers.weights.hf.families.seed_oss
