"""The settings with which responses cannot be generated ahead of training; checked before any process starts."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from mcontroller.errors import ConfigError
from mcontroller.ppo.config import PPOConfig
from mcontroller.ppo.estimators.registry import ADVANTAGE_ESTIMATORS
from mcontroller.ray.resource_pool import ResourcePoolManager, Role

__all__ = ["check_ahead", "check_generates_alone"]

_logger = logging.getLogger(__name__)
_KEY = "trainer.max_staleness"


def check_ahead(config: PPOConfig, roles: Collection[Role]) -> None:
    """Raise ConfigError if ``trainer.max_staleness`` does not fit the roles or the algorithm.

    Logs a warning if nothing in the algorithm corrects for the older policy.
    """
    staleness, algorithm = config.trainer.max_staleness, config.algorithm
    if not staleness:
        return
    if Role.Rollout not in roles:
        raise ConfigError(
            f"{_KEY} is {staleness}, and the actor's processes generate: they cannot train at the same time. Set "
            "rollout={} in the configuration of a run, and pools.rollout.process_on_nodes with GPUs; map Role.Actor "
            f"and Role.Rollout in a program of your own; or set {_KEY}=0",
            key=_KEY,
            value=staleness,
        )
    if ADVANTAGE_ESTIMATORS[algorithm.adv_estimator].needs_greedy:
        raise ConfigError(
            f"algorithm.adv_estimator is {algorithm.adv_estimator!r} with {_KEY}={staleness}: the greedy response, "
            "which is generated when the samples are scored, would be that of a newer policy than theirs. Set "
            f"{_KEY}=0, or another estimator such as rloo",
            key="algorithm.adv_estimator",
            value=algorithm.adv_estimator,
        )
    if algorithm.importance.level == "none" and algorithm.old_log_probs != "rollout":
        _logger.warning(
            "%s is %d, and nothing corrects for the older policy that the responses are from: set "
            "algorithm.importance.level=token, or algorithm.old_log_probs=rollout",
            _KEY,
            staleness,
        )


def check_generates_alone(
    config: PPOConfig, roles: Mapping[Role, Any], pools: ResourcePoolManager, has_rollout_fn: bool
) -> None:
    """Raise ConfigError if generation would wait for training, or for the controller, instead of running beside it."""
    staleness = config.trainer.max_staleness
    if not staleness:
        return
    if has_rollout_fn:
        raise ConfigError(
            f"{_KEY} is {staleness} with a rollout_fn (multi_turn), whose loop of calls runs in the controller, which "
            f"trains at that time: set {_KEY}=0, or generate with one call for each batch",
            key=_KEY,
            value=staleness,
        )
    if not (pools.use_gpu or config.trainer.offload == "always") or Role.Rollout not in pools.mapping:
        return
    pool = pools.mapping[Role.Rollout]
    others = [str(role) for role in roles if role is not Role.Rollout and pools.mapping.get(role) == pool]
    if others:
        raise ConfigError(
            f"{_KEY} is {staleness}, and Role.Rollout shares the pool {pool!r} with {', '.join(others)}, with which it "
            "takes turns: give it a pool of its own, with pools.rollout.process_on_nodes in the configuration of a run "
            f"or the mapping in a program of your own; or set {_KEY}=0",
            key=_KEY,
            value=staleness,
        )
