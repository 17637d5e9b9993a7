"""Megatron-Core models and their training, as workers of a group. No controller code.

Importing the package makes Megatron-Core importable on a machine without a GPU. torch is loaded when Megatron-Core is:
configurations are read and checked without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel_state.lazy import lazy_exports
from parallel_state.patches.import_hook import call_before_import
from parallel_state.requirements import require, require_importable

require("torch", "megatron.core")


def _prepare_megatron() -> None:
    from parallel_state import cpu  # loads torch

    if not cpu.install():
        require_importable("transformer_engine")  # Megatron does not report it if that fails


call_before_import("megatron.core", _prepare_megatron)

if TYPE_CHECKING:
    from workers.actor import ActorRolloutRefWorker as ActorRolloutRefWorker
    from workers.config import ActorConfig as ActorConfig
    from workers.config import CriticConfig as CriticConfig
    from workers.config import ModelConfig as ModelConfig
    from workers.config import OptimConfig as OptimConfig
    from workers.config import ParallelConfig as ParallelConfig
    from workers.config import RewardConfig as RewardConfig
    from workers.config import RolloutConfig as RolloutConfig
    from workers.config import load_config as load_config
    from workers.config.model import model_config_from_hf as model_config_from_hf
    from workers.critic import CriticWorker as CriticWorker
    from workers.from_megatron import model_config_from_megatron as model_config_from_megatron
    from workers.generate.engines import ROLLOUT_ENGINES as ROLLOUT_ENGINES
    from workers.generate.engines import RolloutEngine as RolloutEngine
    from workers.generate.rollout_protocol import Generated as Generated
    from workers.generate.rollout_protocol import LogProbBasis as LogProbBasis
    from workers.generate.rollout_protocol import Prompts as Prompts
    from workers.generate.rollout_protocol import Rollout as Rollout
    from workers.generate.sampling import Sampling as Sampling
    from workers.megatron_worker import MegatronWorker as MegatronWorker
    from workers.model.build import build_model as build_model
    from workers.model.placement import place_chunks as place_chunks
    from workers.model_worker import ModelWorker as ModelWorker
    from workers.reward import RewardModelWorker as RewardModelWorker
    from workers.role_worker import PolicySettings as PolicySettings
    from workers.role_worker import RoleWorker as RoleWorker
    from workers.train.batches import TokenBatch as TokenBatch
    from workers.train.losses import DISTILLATION as DISTILLATION
    from workers.train.losses import SFT as SFT
    from workers.train.losses import TokenLoss as TokenLoss
    from workers.train.losses import masked_sum as masked_sum
    from workers.train.losses import value_loss as value_loss
    from workers.train.metrics import Rule as Rule
    from workers.weights.hf.family import ModelFamily as ModelFamily
    from workers.weights.hf.family import register_model_family as register_model_family
    from workers.weights.hf.model import export_hf as export_hf
    from workers.weights.hf.model import hf_tensors as hf_tensors
    from workers.weights.hf.model import load_hf as load_hf
    from workers.weights.transfer.weight_transfer import WeightTransfer as WeightTransfer
    from workers.weights.whole_tensors import PolicyWeights as PolicyWeights
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
