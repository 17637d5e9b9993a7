"""The roles of an actor's processes, and what is checked before they join each other."""

from __future__ import annotations

from collections.abc import Collection

from mcontroller.errors import ConfigError, before_changes
from workers.config import ActorConfig
from workers.generate.engines import ROLLOUT_ENGINES

_ROLES = ("actor", "rollout", "ref")


def parsed_roles(role: str) -> frozenset[str]:
    """Return the roles in a string such as ``"actor_rollout_ref"``.

    Raises:
        ConfigError: one is unknown, or comes twice.
    """
    roles = role.split("_")
    if len(set(roles)) != len(roles) or not set(roles) <= set(_ROLES):
        raise ConfigError(
            f"role is {role!r}; expected one or more of {', '.join(_ROLES)}, joined by '_'", key="role", value=role
        )
    return frozenset(roles)


def check_engine(by_name: bool, config: ActorConfig, roles: Collection[str]) -> None:
    """Check that the engine that ``rollout.engine`` names can run.

    Args:
        by_name: False if the class builds its own engine: then nothing is checked.
        config: of the actor.
        roles: of the worker.

    Raises:
        ConfigError: the engine cannot run with a field.
    """
    if not by_name:
        return
    engine = ROLLOUT_ENGINES.get_or_raise(config.rollout.engine)
    engine.check(config)
    if config.rollout.vllm.adapter_alone and "actor" not in roles:
        raise ConfigError(
            "rollout.vllm.adapter_alone is true, and the actor is in another group, which sends merged weights: leave "
            "it out, or let the actor's group generate",
            key="rollout.vllm.adapter_alone",
            value=True,
        )
    if config.router_replay == "rollout" and not engine.records_experts:
        recording = [name for name in ROLLOUT_ENGINES if ROLLOUT_ENGINES[name].records_experts]
        raise ConfigError(
            f"router_replay is 'rollout', but rollout.engine {config.rollout.engine!r} does not return the experts of "
            f"its tokens: set router_replay to old_log_probs or none, or rollout.engine to {' or '.join(recording)}",
            key="router_replay",
            value=config.router_replay,
        )


def serves_engine(roles: Collection[str], by_name: bool, config: ActorConfig) -> bool:
    """Return whether a worker only generates, with an engine that has the weights itself: then it builds no model.

    Args:
        roles: of the worker.
        by_name: False if the class builds its own engine, which may need the model.
        config: of the actor.
    """
    return set(roles) == {"rollout"} and by_name and not ROLLOUT_ENGINES[config.rollout.engine].in_worker


def check_reference_moves(config: ActorConfig) -> None:
    """Raise ConfigError if the reference is the policy without its adapter, which nothing changes."""
    if config.model.lora is not None:
        with before_changes():
            raise ConfigError(
                "the reference cannot move towards a policy with model.lora: it is the policy without its adapter; set "
                "trainer.ref_sync_steps=0 and warm_up.steps=0",
                key="model.lora",
            )


def require_role(roles: Collection[str], role: str, method: str) -> None:
    """Raise ConfigError if ``method`` needs a role that the worker does not have."""
    if role not in roles:
        given = "_".join(sorted(roles))
        with before_changes():
            raise ConfigError(f"{method} needs the role {role!r}; this worker is {given!r}", key="role", value=given)
