"""What is computed? Megatron-Core models and their training. No controller code.

Importing the package makes Megatron-Core importable on a machine without a GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

from parallel_state import cpu

cpu.install()

_HOME = {
    "ActorConfig": "config",
    "ActorRolloutRefWorker": "actor",
    "CriticConfig": "config",
    "CriticWorker": "critic",
    "MegatronWorker": "megatron_worker",
    "ModelConfig": "config",
    "ModelWorker": "model_worker",
    "OptimConfig": "config",
    "ParallelConfig": "config",
    "Generated": "rollout",
    "PolicyWeights": "rollout",
    "Prompts": "rollout",
    "RewardConfig": "config",
    "RewardModelWorker": "reward",
    "Rollout": "rollout",
    "RolloutConfig": "config",
    "Sampling": "sampling",
    "build_model": "model",
    "export_hf": "hf",
    "hf_tensors": "hf",
    "load_config": "config",
    "load_hf": "hf",
    "model_config_from_hf": "hf_config",
    "place_chunks": "placement",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
