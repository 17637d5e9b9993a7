"""The groups of a run, from the mapping of roles to worker classes; checked before any process starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcontroller.errors import ConfigError
from mcontroller.ppo.advantages import ADVANTAGE_ESTIMATORS
from mcontroller.ppo.config import PPOConfig
from mcontroller.ray.class_with_init import RayClassWithInitArgs
from mcontroller.ray.resource_pool import Role

__all__ = ["RoleWorker", "check_roles", "role_workers"]

CONFIG_KEYS = {
    Role.ActorRolloutRef: "actor_rollout_ref",
    Role.ActorRollout: "actor_rollout_ref",
    Role.RefPolicy: "ref",
    Role.Critic: "critic",
    Role.RewardModel: "reward_model",
}
"""The field of PPOConfig that is the ``config`` argument of a role's workers."""

GROUPS: Mapping[Role, tuple[str, Mapping[str, Any]]] = {
    Role.ActorRolloutRef: ("actor", {"role": "actor_rollout_ref"}),
    Role.ActorRollout: ("actor", {"role": "actor_rollout"}),
    Role.RefPolicy: ("ref", {"role": "ref"}),
    Role.Critic: ("critic", {}),
    Role.RewardModel: ("reward", {}),
}
"""The group's name and further arguments of a role's workers, in the order in which groups start."""


@dataclass(frozen=True)
class RoleWorker:
    """A group to start.

    Attributes:
        name: the group's name.
        role: its role.
        init: its worker class and the arguments of the workers.
    """

    name: str
    role: Role
    init: RayClassWithInitArgs[Any]


def role_workers(config: PPOConfig, mapping: Mapping[Role, Any]) -> list[RoleWorker]:
    """Return the groups of a run, the actor's first; a critic only if the advantage estimator needs it.

    Raises:
        ConfigError: a role has no configuration, or one that its worker class rejects.
    """
    groups = []
    for role, (name, arguments) in GROUPS.items():
        if role not in mapping or (role is Role.Critic and not _needs_critic(config)):
            continue
        worker_config = getattr(config, CONFIG_KEYS[role])
        if worker_config is None:
            raise _misfit(mapping, f"{role} has no configuration: set {CONFIG_KEYS[role]}")
        groups.append(RoleWorker(name, role, RayClassWithInitArgs(mapping[role], config=worker_config, **arguments)))
    return groups


def check_roles(config: PPOConfig, mapping: Mapping[Role, Any]) -> None:
    """Raise ConfigError if the roles do not fit the configuration."""
    actors = [role for role in (Role.ActorRolloutRef, Role.ActorRollout) if role in mapping]
    if len(actors) != 1:
        raise _misfit(mapping, "map one of Role.ActorRolloutRef and Role.ActorRollout")
    algorithm = config.algorithm
    if _needs_critic(config) and Role.Critic not in mapping:
        raise _misfit(mapping, f"algorithm.adv_estimator={algorithm.adv_estimator} needs Role.Critic")
    has_reference = Role.ActorRolloutRef in mapping or Role.RefPolicy in mapping
    if algorithm.kl_in_reward and not has_reference:
        raise _misfit(mapping, "algorithm.use_kl_in_reward needs Role.ActorRolloutRef or Role.RefPolicy, or is false")
    if config.warm_up.steps and Role.RefPolicy in mapping:
        raise _misfit(
            mapping,
            f"warm_up.steps={config.warm_up.steps} changes the policy that the reference starts from: map "
            "Role.ActorRolloutRef, whose reference is replaced by the actor after the warm-up, or set warm_up.steps=0",
        )


def _needs_critic(config: PPOConfig) -> bool:
    return ADVANTAGE_ESTIMATORS.get_or_raise(config.algorithm.adv_estimator).needs_critic


def _misfit(mapping: Mapping[Role, Any], rule: str) -> ConfigError:
    mapped = ", ".join(str(role) for role in mapping) or "none"
    return ConfigError(f"role_worker_mapping has {mapped}: {rule}", key="role_worker_mapping", value=mapped)
