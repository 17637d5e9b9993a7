"""Reinforcement learning of the PPO family: configuration, advantages, losses, KL, rewards and the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel_state.lazy import lazy_exports

if TYPE_CHECKING:
    from mcontroller.ppo.agents.trajectories import Submitted as Submitted
    from mcontroller.ppo.agents.trajectories import TrajectoryRollout as TrajectoryRollout
    from mcontroller.ppo.agents.trajectory import Trajectory as Trajectory
    from mcontroller.ppo.agents.turns import ENVIRONMENTS as ENVIRONMENTS
    from mcontroller.ppo.agents.turns import MultiTurnRollout as MultiTurnRollout
    from mcontroller.ppo.agents.turns import TurnEnvironment as TurnEnvironment
    from mcontroller.ppo.config import AlgorithmConfig as AlgorithmConfig
    from mcontroller.ppo.config import AsynchronousConfig as AsynchronousConfig
    from mcontroller.ppo.config import DataConfig as DataConfig
    from mcontroller.ppo.config import FilterGroupsConfig as FilterGroupsConfig
    from mcontroller.ppo.config import MultiTurnConfig as MultiTurnConfig
    from mcontroller.ppo.config import OverlongConfig as OverlongConfig
    from mcontroller.ppo.config import PPOConfig as PPOConfig
    from mcontroller.ppo.config import TrainerConfig as TrainerConfig
    from mcontroller.ppo.config import ValidationConfig as ValidationConfig
    from mcontroller.ppo.config import WarmUpConfig as WarmUpConfig
    from mcontroller.ppo.data import BatchStream as BatchStream
    from mcontroller.ppo.data import Mixture as Mixture
    from mcontroller.ppo.data import UpdateRules as UpdateRules
    from mcontroller.ppo.data import collate as collate
    from mcontroller.ppo.data import supervised_rows as supervised_rows
    from mcontroller.ppo.datasets.config import DatasetConfig as DatasetConfig
    from mcontroller.ppo.datasets.config import ProblemsConfig as ProblemsConfig
    from mcontroller.ppo.datasets.prompts import Demonstration as Demonstration
    from mcontroller.ppo.datasets.prompts import Demonstrations as Demonstrations
    from mcontroller.ppo.datasets.prompts import PromptRows as PromptRows
    from mcontroller.ppo.datasets.sources import DATASET_SOURCES as DATASET_SOURCES
    from mcontroller.ppo.datasets.sources import Records as Records
    from mcontroller.ppo.datasets.sources import load_records as load_records
    from mcontroller.ppo.datasets.tokenizers import TOKENIZERS as TOKENIZERS
    from mcontroller.ppo.datasets.tokenizers import TokenizerSource as TokenizerSource
    from mcontroller.ppo.display import Callback as Callback
    from mcontroller.ppo.display import Display as Display
    from mcontroller.ppo.display import ProgressDisplay as ProgressDisplay
    from mcontroller.ppo.estimators.built_in import GAEOptions as GAEOptions
    from mcontroller.ppo.estimators.built_in import GPGOptions as GPGOptions
    from mcontroller.ppo.estimators.built_in import GRPOOptions as GRPOOptions
    from mcontroller.ppo.estimators.built_in import (
        ReinforcePlusPlusBaselineOptions as ReinforcePlusPlusBaselineOptions,
    )
    from mcontroller.ppo.estimators.built_in import ReinforcePlusPlusOptions as ReinforcePlusPlusOptions
    from mcontroller.ppo.estimators.built_in import RLOOOptions as RLOOOptions
    from mcontroller.ppo.estimators.built_in import compute_gae as compute_gae
    from mcontroller.ppo.estimators.registry import ADVANTAGE_ESTIMATORS as ADVANTAGE_ESTIMATORS
    from mcontroller.ppo.estimators.registry import AdvantageEstimator as AdvantageEstimator
    from mcontroller.ppo.estimators.registry import KLInReward as KLInReward
    from mcontroller.ppo.estimators.registry import compute_advantage as compute_advantage
    from mcontroller.ppo.estimators.registry import register_advantage_estimator as register_advantage_estimator
    from mcontroller.ppo.generation import RolloutFunction as RolloutFunction
    from mcontroller.ppo.kl import KL_CONTROLLERS as KL_CONTROLLERS
    from mcontroller.ppo.kl import KL_ESTIMATORS as KL_ESTIMATORS
    from mcontroller.ppo.kl import AdaptiveKLController as AdaptiveKLController
    from mcontroller.ppo.kl import FixedKLController as FixedKLController
    from mcontroller.ppo.kl import KLControlConfig as KLControlConfig
    from mcontroller.ppo.kl import apply_kl_penalty as apply_kl_penalty
    from mcontroller.ppo.kl import estimate_kl as estimate_kl
    from mcontroller.ppo.kl import register_kl_estimator as register_kl_estimator
    from mcontroller.ppo.losses.importance import ImportanceConfig as ImportanceConfig
    from mcontroller.ppo.losses.registry import AGGREGATIONS as AGGREGATIONS
    from mcontroller.ppo.losses.registry import POLICY_LOSSES as POLICY_LOSSES
    from mcontroller.ppo.losses.registry import PolicyLoss as PolicyLoss
    from mcontroller.ppo.losses.registry import register_policy_loss as register_policy_loss
    from mcontroller.ppo.mismatch import importance_weights as importance_weights
    from mcontroller.ppo.mismatch import mismatch_metrics as mismatch_metrics
    from mcontroller.ppo.rewards.config import RewardFunctionConfig as RewardFunctionConfig
    from mcontroller.ppo.rewards.config import RewardsConfig as RewardsConfig
    from mcontroller.ppo.rewards.configured import FunctionRewards as FunctionRewards
    from mcontroller.ppo.rewards.reward import Reward as Reward
    from mcontroller.ppo.rewards.reward import RewardFunction as RewardFunction
    from mcontroller.ppo.rewards.reward import outcome_scores as outcome_scores
    from mcontroller.ppo.rewards.reward import rule_only as rule_only
    from mcontroller.ppo.rewards.reward import sum_of_rewards as sum_of_rewards
    from mcontroller.ppo.rewards.reward import weighted_sum as weighted_sum
    from mcontroller.ppo.roles import Role as Role
    from mcontroller.ppo.rollout_restart import restart_rollout as restart_rollout
    from mcontroller.ppo.stages import Stages as Stages
    from mcontroller.ppo.trainer import RayPPOTrainer as RayPPOTrainer
    from mcontroller.ppo.validation import Evaluation as Evaluation
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
