"""Reinforcement learning of the PPO family: configuration, advantages, losses, KL, rewards and the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel_state.lazy import lazy_exports

if TYPE_CHECKING:
    from trainer.columns import supervised_rows as supervised_rows
    from trainer.config import AlgorithmConfig as AlgorithmConfig
    from trainer.config import AsynchronousConfig as AsynchronousConfig
    from trainer.config import DataConfig as DataConfig
    from trainer.config import FilterGroupsConfig as FilterGroupsConfig
    from trainer.config import ImportanceConfig as ImportanceConfig
    from trainer.config import MultiTurnConfig as MultiTurnConfig
    from trainer.config import OverlongConfig as OverlongConfig
    from trainer.config import PPOConfig as PPOConfig
    from trainer.config import TrainerConfig as TrainerConfig
    from trainer.config import ValidationConfig as ValidationConfig
    from trainer.config import WarmUpConfig as WarmUpConfig
    from trainer.data.config import DatasetConfig as DatasetConfig
    from trainer.data.config import ProblemsConfig as ProblemsConfig
    from trainer.data.prompts import Demonstration as Demonstration
    from trainer.data.prompts import Demonstrations as Demonstrations
    from trainer.data.prompts import PromptRows as PromptRows
    from trainer.data.sources import DATASET_SOURCES as DATASET_SOURCES
    from trainer.data.sources import Records as Records
    from trainer.data.sources import load_records as load_records
    from trainer.data.stream import BatchStream as BatchStream
    from trainer.data.stream import Mixture as Mixture
    from trainer.data.stream import collate as collate
    from trainer.data.tokenizers import TOKENIZERS as TOKENIZERS
    from trainer.data.tokenizers import TextTokenizer as TextTokenizer
    from trainer.data.tokenizers import TokenizerSource as TokenizerSource
    from trainer.display import Display as Display
    from trainer.display import ProgressDisplay as ProgressDisplay
    from trainer.estimators.built_in import GAEOptions as GAEOptions
    from trainer.estimators.built_in import GPGOptions as GPGOptions
    from trainer.estimators.built_in import GRPOOptions as GRPOOptions
    from trainer.estimators.built_in import (
        ReinforcePlusPlusBaselineOptions as ReinforcePlusPlusBaselineOptions,
    )
    from trainer.estimators.built_in import ReinforcePlusPlusOptions as ReinforcePlusPlusOptions
    from trainer.estimators.built_in import RLOOOptions as RLOOOptions
    from trainer.estimators.built_in import compute_gae as compute_gae
    from trainer.estimators.registry import ADVANTAGE_ESTIMATORS as ADVANTAGE_ESTIMATORS
    from trainer.estimators.registry import AdvantageEstimator as AdvantageEstimator
    from trainer.estimators.registry import KLInReward as KLInReward
    from trainer.estimators.registry import compute_advantage as compute_advantage
    from trainer.estimators.registry import register_advantage_estimator as register_advantage_estimator
    from trainer.kl import KL_CONTROLLERS as KL_CONTROLLERS
    from trainer.kl import AdaptiveKLController as AdaptiveKLController
    from trainer.kl import FixedKLController as FixedKLController
    from trainer.kl import KLControlConfig as KLControlConfig
    from trainer.kl import apply_kl_penalty as apply_kl_penalty
    from trainer.lifecycle import Callback as Callback
    from trainer.loop import RayPPOTrainer as RayPPOTrainer
    from trainer.mismatch import importance_weights as importance_weights
    from trainer.mismatch import mismatch_metrics as mismatch_metrics
    from trainer.rewards.config import RewardFunctionConfig as RewardFunctionConfig
    from trainer.rewards.config import RewardsConfig as RewardsConfig
    from trainer.rewards.configured import FunctionRewards as FunctionRewards
    from trainer.rewards.reward import Reward as Reward
    from trainer.rewards.reward import RewardFunction as RewardFunction
    from trainer.rewards.reward import outcome_scores as outcome_scores
    from trainer.rewards.reward import rule_only as rule_only
    from trainer.rewards.reward import weighted_sum as weighted_sum
    from trainer.roles import Role as Role
    from trainer.rollout.episodes import Demonstrating as Demonstrating
    from trainer.rollout.episodes import Episodes as Episodes
    from trainer.rollout.generation import RolloutFunction as RolloutFunction
    from trainer.rollout.trajectories import Submitted as Submitted
    from trainer.rollout.trajectories import TrajectoryRollout as TrajectoryRollout
    from trainer.rollout.trajectory import Trajectory as Trajectory
    from trainer.stages import Stages as Stages
    from trainer.validation import Evaluation as Evaluation
    from workers.losses.kl import KL_ESTIMATORS as KL_ESTIMATORS
    from workers.losses.kl import estimate_kl as estimate_kl
    from workers.losses.kl import register_kl_estimator as register_kl_estimator
    from workers.losses.policy import AGGREGATIONS as AGGREGATIONS
    from workers.losses.policy import POLICY_LOSSES as POLICY_LOSSES
    from workers.losses.policy import PolicyLoss as PolicyLoss
    from workers.losses.policy import register_policy_loss as register_policy_loss
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
