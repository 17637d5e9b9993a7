"""Configurations of the workers: one dataclass per idea, each field documented below it.

``load_config`` reads them from files, mappings and overrides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel_state.lazy import lazy_exports

if TYPE_CHECKING:
    from mcontroller.config.load import load_config as load_config
    from workers.config.lora import LoraConfig as LoraConfig
    from workers.config.model import ModelConfig as ModelConfig
    from workers.config.optim import DECAY_STYLES as DECAY_STYLES
    from workers.config.optim import OptimConfig as OptimConfig
    from workers.config.parallel import ParallelConfig as ParallelConfig
    from workers.config.roles import ActorConfig as ActorConfig
    from workers.config.roles import CriticConfig as CriticConfig
    from workers.config.roles import RewardConfig as RewardConfig
    from workers.config.roles import RoleConfig as RoleConfig
    from workers.config.rollout import RolloutConfig as RolloutConfig
    from workers.config.vllm import VllmConfig as VllmConfig
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
