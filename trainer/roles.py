"""The groups of a run, from the mapping of roles to worker classes; checked before any process starts."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from mcontroller.config.fields import check_unused
from mcontroller.config.load import with_whole_key
from mcontroller.errors import ConfigError
from mcontroller.ray.class_with_init import RayClassWithInitArgs, plain_class
from mcontroller.ray.resource_pool import ResourcePoolManager
from trainer.config import PPOConfig
from trainer.estimators.registry import ADVANTAGE_ESTIMATORS
from trainer.rollout.episodes import Episodes
from workers.config import ActorConfig
from workers.role_worker import PolicySettings, RoleWorker

STALENESS = "trainer.max_staleness"
_logger = logging.getLogger(__name__)


class Role(Enum):
    """The roles of models in reinforcement learning."""

    Actor = auto()
    Rollout = auto()
    ActorRollout = auto()
    Critic = auto()
    RefPolicy = auto()
    RewardModel = auto()
    ActorRolloutRef = auto()


GROUPS: Mapping[Role, tuple[str, str, Mapping[str, Any]]] = {
    Role.ActorRolloutRef: ("actor", "actor_rollout_ref", {"role": "actor_rollout_ref"}),
    Role.ActorRollout: ("actor", "actor_rollout_ref", {"role": "actor_rollout"}),
    Role.Actor: ("actor", "actor_rollout_ref", {"role": "actor"}),
    Role.Rollout: ("rollout", "rollout", {"role": "rollout"}),
    Role.RefPolicy: ("ref", "ref", {"role": "ref"}),
    Role.Critic: ("critic", "critic", {}),
    Role.RewardModel: ("reward", "reward_model", {}),
}
"""The group's name, the field of PPOConfig that is the ``config`` argument of its workers, and their other arguments,
in the order in which groups start."""

CONFIG_KEYS = {role: key for role, (_, key, _) in GROUPS.items()}

_WITH_REFERENCE = (
    "set ref={} in the configuration of a run, or map Role.RefPolicy or Role.ActorRolloutRef in a program of your own"
)

PAUSES = {"continue": "keep", "finish": "wait", "stop": "abort"}
"""``rollout.vllm.pause`` by ``trainer.asynchronous.partial``."""


@dataclass(frozen=True)
class GroupSpec:
    """A group to start.

    Attributes:
        name: the group's name.
        role: its role.
        init: its worker class and the arguments of the workers.
    """

    name: str
    role: Role
    init: RayClassWithInitArgs[RoleWorker]

    @property
    def config(self) -> Any:
        """The configuration of its workers."""
        return self.init.kwargs["config"]


def role_class(mapping: Mapping[Role, Any], role: Role) -> type[RoleWorker]:
    """Return the worker class of a role.

    Raises:
        ConfigError: it does not derive from ``RoleWorker``.
    """
    cls = plain_class(mapping[role])
    if not (isinstance(cls, type) and issubclass(cls, RoleWorker)):
        name = getattr(cls, "__name__", repr(cls))
        raise ConfigError(
            f"the worker class {name} of {role} does not derive from workers.RoleWorker, whose methods RayPPOTrainer "
            f"calls: write class {name}(RoleWorker), or derive it from the worker of workers for that role",
            key="role_worker_mapping",
            value=name,
        )
    return cls


def policy_settings(config: PPOConfig, mapping: Mapping[Role, Any]) -> PolicySettings:
    """Return the settings of the policy that is trained."""
    return role_class(mapping, _actor_role(mapping)).policy_settings(config.actor_rollout_ref)


def _actor_role(mapping: Mapping[Role, Any]) -> Role:
    return next(role for role in (Role.ActorRolloutRef, Role.ActorRollout, Role.Actor) if role in mapping)


def role_workers(config: PPOConfig, mapping: Mapping[Role, Any]) -> list[GroupSpec]:
    """Return the groups of a run, the actor's first; a critic and a reference only if the run needs them.

    Raises:
        ConfigError: a role has no configuration, or one that its worker class rejects.
    """
    groups = []
    reference = reads_reference(config, mapping)
    for role, (name, key, arguments) in GROUPS.items():
        if role not in mapping or (role is Role.Critic and not _needs_critic(config)):
            continue
        if role is Role.RefPolicy and not reference:
            continue
        if role is Role.ActorRolloutRef and not reference:
            arguments = {"role": "actor_rollout"}
        if role in (Role.Actor, Role.ActorRollout) and reference and Role.RefPolicy not in mapping:
            arguments = {"role": f"{arguments['role']}_ref"}  # the policy without its adapter
        worker_config = getattr(config, key)
        if worker_config is None:
            raise _misfit(mapping, f"{role} has no configuration: set {key}")
        cls = role_class(mapping, role)
        try:
            if isinstance(worker_config, ActorConfig) and worker_config.rollout.engine == "vllm":
                worker_config = _with_pause(worker_config, config.trainer.asynchronous.partial)
            if name == "actor":
                worker_config = _with_kl_loss(worker_config, config, mapping)
            init = RayClassWithInitArgs(cls, config=worker_config, **arguments)
            init.imports = tuple(config.imports)
            if name == "actor":
                cls.check_run(worker_config)
        except ConfigError as error:
            raise with_whole_key(error, type(config), (key,)) from error
        groups.append(GroupSpec(name, role, init))
    return groups


def _with_pause(generating: ActorConfig, partial: str) -> ActorConfig:
    """Return the configuration of a group with engines whose requests do as ``trainer.asynchronous.partial`` says."""
    vllm, reason = generating.rollout.vllm, "in a run: trainer.asynchronous.partial sets it"
    check_unused(vllm, ("pause",), "rollout.vllm.", reason)
    rollout = dataclasses.replace(generating.rollout, vllm=dataclasses.replace(vllm, pause=PAUSES[partial]))
    return dataclasses.replace(generating, rollout=rollout)


def check_roles(config: PPOConfig, mapping: Mapping[Role, Any], pools: ResourcePoolManager | None = None) -> None:
    """Raise ConfigError if the roles do not fit the configuration, or their pools."""
    actors = [role for role in (Role.ActorRolloutRef, Role.ActorRollout, Role.Actor) if role in mapping]
    if len(actors) != 1 or (Role.Actor in mapping) != (Role.Rollout in mapping):
        raise _misfit(mapping, "map one of Role.ActorRolloutRef and Role.ActorRollout, or Role.Actor and Role.Rollout")
    if Role.Rollout in mapping:
        if config.rollout is not None:
            role_class(mapping, Role.Actor).check_transfer(config.actor_rollout_ref, config.rollout)
        if pools is not None:
            _check_colocated(pools, Role.Actor, Role.Rollout)
    _check_ahead(config, mapping)
    _check_reference_sync(config, mapping)
    algorithm = config.algorithm
    if _needs_critic(config) and Role.Critic not in mapping:
        raise _misfit(mapping, f"algorithm.adv_estimator={algorithm.adv_estimator} needs Role.Critic")
    if config.trainer.critic_warmup and not _needs_critic(config):
        check_unused(
            config.trainer,
            ("critic_warmup",),
            "trainer.",
            f"but to train nothing: algorithm.adv_estimator={algorithm.adv_estimator} has no critic",
        )
    if config.rollout is None and Role.Rollout not in mapping:
        reason = "in a run whose actor generates: no weights are sent"
        check_unused(config.trainer, ("weight_timeout",), "trainer.", reason)
    if algorithm.kl_in_reward and not has_reference(config, mapping):
        raise _misfit(
            mapping,
            f"the KL in the reward needs a reference: {_WITH_REFERENCE}, or set algorithm.use_kl_in_reward=false "
            "(with gae and reinforce_plus_plus it is on by default)",
        )
    settings = policy_settings(config, mapping)
    if settings.use_kl_loss and not has_reference(config, mapping):
        raise _misfit(
            mapping, f"actor_rollout_ref.use_kl_loss needs a reference: {_WITH_REFERENCE}, or set it to false"
        )
    _check_group_size(config, settings.n)
    _check_router_replay(config, settings.router_replay)
    if algorithm.overlong.buffer:
        response_limit(config, mapping)
    if config.warm_up.steps and settings.has_adapter and reads_reference(config, mapping):
        raise ConfigError(
            f"warm_up.steps is {config.warm_up.steps} with actor_rollout_ref.model.lora: the reference, which is the "
            "policy without its adapter, would not be the policy after the warm-up. Set warm_up.steps=0, or "
            "actor_rollout_ref.use_kl_loss and algorithm.use_kl_in_reward to false",
            key="warm_up.steps",
            value=config.warm_up.steps,
        )
    if config.warm_up.steps and Role.RefPolicy in mapping:
        raise _misfit(
            mapping,
            f"warm_up.steps={config.warm_up.steps} changes the policy that the reference starts from: map "
            "Role.ActorRolloutRef, whose reference is replaced by the actor after the warm-up, or set warm_up.steps=0",
        )


def _check_reference_sync(config: PPOConfig, mapping: Mapping[Role, Any]) -> None:
    """Raise ConfigError if the reference is to follow the policy, and is not in the same workers or never read."""
    steps = config.trainer.ref_sync_steps
    if steps and policy_settings(config, mapping).has_adapter:
        raise ConfigError(
            f"trainer.ref_sync_steps is {steps} with actor_rollout_ref.model.lora: the reference is the policy without "
            "its adapter, and does not move; set trainer.ref_sync_steps=0",
            key="trainer.ref_sync_steps",
            value=steps,
        )
    if steps and Role.ActorRolloutRef not in mapping:
        raise _misfit(
            mapping,
            f"trainer.ref_sync_steps={steps} copies the policy to the reference of the same workers: map "
            "Role.ActorRolloutRef, or set trainer.ref_sync_steps=0",
        )
    if steps and not reads_reference(config, mapping):
        raise ConfigError(
            f"trainer.ref_sync_steps={steps} moves a reference that nothing reads: set actor_rollout_ref.use_kl_loss "
            "or algorithm.use_kl_in_reward to true, or trainer.ref_sync_steps=0",
            key="trainer.ref_sync_steps",
            value=steps,
        )


def response_limit(config: PPOConfig, mapping: Mapping[Role, Any]) -> int:
    """Return the longest possible response, [tokens]: ``rollout.response_length`` of the workers that generate.

    Raises:
        ConfigError: their configuration does not have it.
    """
    key = "actor_rollout_ref" if config.rollout is None else "rollout"
    cls = role_class(mapping, Role.Rollout if Role.Rollout in mapping else _actor_role(mapping))
    length = cls.policy_settings(config.actor_rollout_ref if config.rollout is None else config.rollout).response_length
    if length is None:
        raise ConfigError(
            f"algorithm.overlong.buffer is {config.algorithm.overlong.buffer}, which counts back from "
            f"{key}.rollout.response_length, and {cls.__name__}.policy_settings returns none: set "
            "algorithm.overlong.buffer=0",
            key="algorithm.overlong.buffer",
        )
    return length


def has_reference(config: PPOConfig, mapping: Mapping[Role, Any]) -> bool:
    """Return whether there is a reference policy: an actor with an adapter is one when that is off."""
    is_built = Role.ActorRolloutRef in mapping or Role.RefPolicy in mapping
    return is_built or policy_settings(config, mapping).has_adapter


def reads_reference(config: PPOConfig, mapping: Mapping[Role, Any]) -> bool:
    """Return whether a run reads log-probabilities of the reference: in the reward, or in the actor's loss.

    A reference that nothing reads is not built.
    """
    in_loss = policy_settings(config, mapping).use_kl_loss
    if in_loss is None:
        in_loss = not config.algorithm.kl_in_reward
    return has_reference(config, mapping) and (config.algorithm.kl_in_reward or in_loss)


def _with_kl_loss(actor: Any, config: PPOConfig, mapping: Mapping[Role, Any]) -> Any:
    """Return the actor's configuration with the default of ``use_kl_loss``: true if the KL is not in the reward."""
    if policy_settings(config, mapping).use_kl_loss is not None:
        return actor
    return dataclasses.replace(actor, use_kl_loss=has_reference(config, mapping) and not config.algorithm.kl_in_reward)


def _check_group_size(config: PPOConfig, n: int | None) -> None:
    """Raise ConfigError if an estimator or a filter compares the responses to a prompt, and there is one of each."""
    name, filters = config.algorithm.adv_estimator, config.algorithm.filter_groups.enable
    if n == 1 and (ADVANTAGE_ESTIMATORS[name].needs_group or filters):
        setting = "filter_groups.enable=true" if filters else f"adv_estimator={name}"
        effect = "no prompt would be kept" if filters else "every advantage would be 0"
        raise ConfigError(
            f"actor_rollout_ref.rollout.n is 1 with algorithm.{setting}, which compares the responses to one prompt: "
            f"{effect}. Set actor_rollout_ref.rollout.n to 2 or more, such as 8",
            key="actor_rollout_ref.rollout.n",
            value=n,
        )
    if n == 2 and name == "rloo":
        reason = "with actor_rollout_ref.rollout.n=2: one other response has no standard deviation"
        check_unused(config.algorithm.rloo, ("scale",), "algorithm.rloo.", reason)


def _check_router_replay(config: PPOConfig, mode: str) -> None:
    """Raise ConfigError if the pass whose experts are to be replayed is never made."""
    if mode == "old_log_probs" and config.algorithm.old_log_probs == "rollout":
        raise ConfigError(
            "actor_rollout_ref.router_replay is 'old_log_probs' with algorithm.old_log_probs='rollout', for which no "
            "pass computes old log-probabilities: set actor_rollout_ref.router_replay=rollout, or "
            "algorithm.old_log_probs=policy",
            key="actor_rollout_ref.router_replay",
            value=mode,
        )


def _needs_critic(config: PPOConfig) -> bool:
    return ADVANTAGE_ESTIMATORS.get_or_raise(config.algorithm.adv_estimator).needs_critic


def _misfit(mapping: Mapping[Role, Any], rule: str) -> ConfigError:
    mapped = ", ".join(str(role) for role in mapping) or "none"
    return ConfigError(f"role_worker_mapping has {mapped}: {rule}", key="role_worker_mapping", value=mapped)


def _check_ahead(config: PPOConfig, roles: Collection[Role]) -> None:
    """Raise ConfigError if ``trainer.max_staleness`` does not fit the roles or the algorithm.

    Logs a warning if nothing in the algorithm corrects for the older policy.
    """
    staleness, algorithm = config.trainer.max_staleness, config.algorithm
    if not staleness:
        return
    if Role.Rollout not in roles:
        raise ConfigError(
            f"{STALENESS} is {staleness}, and the actor's processes generate: they cannot train at the same time. Set "
            "rollout={} in the configuration of a run, and pools.rollout.process_on_nodes with GPUs; map Role.Actor "
            f"and Role.Rollout in a program of your own; or set {STALENESS}=0",
            key=STALENESS,
            value=staleness,
        )
    if ADVANTAGE_ESTIMATORS[algorithm.adv_estimator].needs_greedy:
        raise ConfigError(
            f"algorithm.adv_estimator is {algorithm.adv_estimator!r} with {STALENESS}={staleness}: the greedy "
            "response, which is generated when the samples are scored, would be that of a newer policy than theirs. "
            f"Set {STALENESS}=0, or another estimator such as rloo",
            key="algorithm.adv_estimator",
            value=algorithm.adv_estimator,
        )
    if algorithm.importance.level == "none" and algorithm.old_log_probs != "rollout":
        _logger.warning(
            "trainer.max_staleness is %d, and nothing corrects for the older policy that the responses are from: set "
            "algorithm.importance.level=token, or algorithm.old_log_probs=rollout",
            staleness,
        )


def check_generates_alone(
    config: PPOConfig, roles: Mapping[Role, Any], pools: ResourcePoolManager, rollout_fn: Any = None
) -> None:
    """Raise ConfigError if generation would wait for training, or for the controller, instead of running beside it."""
    staleness = config.trainer.max_staleness
    if not staleness:
        return
    if staleness == 1 and rollout_fn is None:
        reason = f"with {STALENESS}=1, whose batches are generated in one call: set it to 2 or more"
        options = dataclasses.replace(config.trainer.asynchronous, replay=None)  # which is the same run again
        names = [field.name for field in dataclasses.fields(options)]
        check_unused(options, names, "trainer.asynchronous.", reason)
    if rollout_fn is not None and not isinstance(rollout_fn, Episodes):
        raise ConfigError(
            f"{STALENESS} is {staleness} with a rollout_fn, whose calls come from the controller, which trains "
            f"at that time: set {STALENESS}=0, or multi_turn.episode (Episodes in a program), whose turns are "
            "generated by trajectory",
            key=STALENESS,
            value=staleness,
        )
    if rollout_fn is not None and config.trainer.asynchronous.check_replay:
        raise ConfigError(
            "trainer.asynchronous.check_replay is true with a rollout_fn: turns of an episode may have settings of "
            "their own, which are not recorded, so that they cannot be generated again. Set it to false: the recorded "
            "tokens are trained on",
            key="trainer.asynchronous.check_replay",
            value=True,
        )
    if rollout_fn is not None and rollout_fn.processes and config.trainer.asynchronous.schedule == "simulated":
        raise ConfigError(
            "trainer.asynchronous.schedule is 'simulated', and the time at which episodes in "
            f"{rollout_fn.processes} processes ask for a turn is not: set multi_turn.processes=0, or schedule=live",
            key="trainer.asynchronous.schedule",
            value="simulated",
        )
    if not (pools.use_gpu or config.trainer.offload == "always") or Role.Rollout not in pools.mapping:
        return
    pool = pools.mapping[Role.Rollout]
    others = [str(role) for role in roles if role is not Role.Rollout and pools.mapping.get(role) == pool]
    if others:
        raise ConfigError(
            f"{STALENESS} is {staleness}, and Role.Rollout shares the pool {pool!r} with {', '.join(others)}, "
            "with which it takes turns: give it a separate pool, with pools.rollout.process_on_nodes in the "
            f"configuration of a run or the mapping in a program of your own; or set {STALENESS}=0",
            key=STALENESS,
            value=staleness,
        )


def _check_colocated(pools: ResourcePoolManager, actor: Role, rollout: Role) -> None:
    """Raise ConfigError if actor and rollout share GPUs of several nodes, between which no transport carries weights.

    Args:
        pools: the pools of the run.
        actor: the role that weights come from.
        rollout: the role that weights go to.
    """
    pool = pools.mapping.get(rollout)
    nodes = len(pools.resource_pool_spec.get(pool or "", ()))
    if pools.use_gpu and nodes > 1 and pool == pools.mapping.get(actor):
        raise ConfigError(
            f"{actor} and {rollout} share the GPUs of pool {pool!r} on {nodes} nodes, and weights travel between "
            f"groups that share GPUs within one node only: give {rollout} a separate pool (pools.rollout), let the "
            "processes of the actor generate (Role.ActorRollout; in a file, no section rollout), or use one node",
            key="role_worker_mapping",
            value=pool,
        )
