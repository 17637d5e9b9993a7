"""Which groups a run has: from the mapping of roles to worker classes, checked before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcontroller.errors import ConfigError
from mcontroller.ppo.advantages import advantage_estimator
from mcontroller.ppo.config import PPOConfig
from mcontroller.ppo.kl import KL_ESTIMATORS
from mcontroller.ray.resource_pool import Role

__all__ = ["RoleWorker", "check_roles", "role_workers"]

CONFIG_KEYS = {
    Role.ActorRolloutRef: "actor_rollout_ref",
    Role.ActorRollout: "actor_rollout_ref",
    Role.RefPolicy: "ref",
    Role.Critic: "critic",
    Role.RewardModel: "reward_model",
}
"""Which part of PPOConfig the workers of a role are made with."""


@dataclass(frozen=True)
class RoleWorker:
    """One group to start: its name, its role, the class of its workers and what they are made with."""

    name: str
    role: Role
    cls: Any
    arguments: Mapping[str, Any]


def role_workers(config: PPOConfig, mapping: Mapping[Role, Any]) -> list[RoleWorker]:
    """The groups of a run, the actor's first; a critic only where the advantage estimator needs it."""
    needs_critic = advantage_estimator(config.algorithm.adv_estimator).needs_critic
    possible: dict[Role, tuple[str, dict[str, Any]]] = {
        Role.ActorRolloutRef: ("actor", {"role": "actor_rollout_ref"}),
        Role.ActorRollout: ("actor", {"role": "actor_rollout"}),
        Role.RefPolicy: ("ref", {"role": "ref"}),
        Role.Critic: ("critic", {}),
        Role.RewardModel: ("reward", {}),
    }
    return [
        RoleWorker(name, role, mapping[role], {"config": getattr(config, CONFIG_KEYS[role]), **arguments})
        for role, (name, arguments) in possible.items()
        if role in mapping and (role is not Role.Critic or needs_critic)
    ]


def check_roles(config: PPOConfig, mapping: Mapping[Role, Any]) -> None:
    """Raises ConfigError where roles and configuration do not fit together, or a name in it is unknown."""
    actors = [role for role in (Role.ActorRolloutRef, Role.ActorRollout) if role in mapping]
    if len(actors) != 1:
        _refuse(mapping, "map one of Role.ActorRolloutRef and Role.ActorRollout")
    algorithm = config.algorithm
    if advantage_estimator(algorithm.adv_estimator).needs_critic and Role.Critic not in mapping:
        _refuse(mapping, f"algorithm.adv_estimator={algorithm.adv_estimator} needs Role.Critic")
    has_reference = Role.ActorRolloutRef in mapping or Role.RefPolicy in mapping
    if algorithm.use_kl_in_reward and not has_reference:
        _refuse(mapping, "algorithm.use_kl_in_reward needs Role.ActorRolloutRef or Role.RefPolicy")
    if config.warm_up.steps and Role.RefPolicy in mapping:
        _refuse(
            mapping,
            f"warm_up.steps={config.warm_up.steps} changes the policy that the reference starts from: map "
            "Role.ActorRolloutRef, whose reference takes over the actor's weights, or leave the warm-up out",
        )
    for worker in role_workers(config, mapping):
        if worker.arguments["config"] is None:
            _refuse(mapping, f"{worker.role} has no configuration: set {CONFIG_KEYS[worker.role]}")
    if algorithm.kl_penalty not in KL_ESTIMATORS:
        raise ConfigError(
            f"algorithm.kl_penalty is {algorithm.kl_penalty!r}; it is one of {', '.join(KL_ESTIMATORS)}",
            key="algorithm.kl_penalty",
            value=algorithm.kl_penalty,
        )


def _refuse(mapping: Mapping[Role, Any], rule: str) -> None:
    mapped = ", ".join(str(role) for role in mapping) or "none"
    raise ConfigError(f"role_worker_mapping has {mapped}: {rule}", key="role_worker_mapping", value=mapped)
