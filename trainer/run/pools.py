"""The pools of a run: which role runs in which, and whether its layout and the number of slots fit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from mcontroller.config.checks import close_names
from mcontroller.errors import ConfigError, LayoutError
from mcontroller.ray.resource_pool import ResourcePoolManager
from trainer.roles import CONFIG_KEYS, Role
from trainer.run.config import MAIN_POOL, OWN_POOL_ROLES, ROLES, RunConfig

ADD_ROLE = {
    "rollout": "the actor's processes generate: set rollout={}, which takes its values from actor_rollout_ref",
    "ref": "the run has no separate reference policy: add the section ref",
    "critic": "the run has no critic: set algorithm.adv_estimator=gae, or another estimator that needs one",
    "reward_model": "the run has no reward model: add the section reward_model",
}
"""Why a run has no group of a role, and what to set."""


def pool_nodes(config: RunConfig) -> dict[str, list[int]]:
    """Return the bundles on each node of every pool, by its name."""
    named = {name: pool.process_on_nodes for name, pool in config.pools.items() if name != MAIN_POOL}
    return {MAIN_POOL: config.pool.process_on_nodes, **named}


def pool_names(config: RunConfig) -> dict[str, str]:
    """Return the name of the pool of every role, by the key of the role."""
    names = dict.fromkeys(ROLES, MAIN_POOL)
    for name, pool in config.pools.items():
        names |= {role: name for role in pool.roles or [name] if role in OWN_POOL_ROLES}
    return names


def nodes_of_ranks(config: RunConfig, key: str) -> list[str]:
    """Return a name of the node of each rank of a role, given by its key."""
    pool = pool_nodes(config)[pool_names(config).get(key, MAIN_POOL)]
    return [f"node{node}" for node, size in enumerate(pool) for _ in range(size)]


def pools_of(config: RunConfig, roles: Iterable[Role]) -> ResourcePoolManager:
    """Return the pools of the run, in each bundle of which every role of the pool has a slot."""
    names, pool = pool_names(config), config.pool
    return ResourcePoolManager(
        resource_pool_spec=pool_nodes(config),
        mapping={role: names[CONFIG_KEYS[role]] for role in roles},
        use_gpu=pool.use_gpu,
        max_colocate_count=None if pool.max_colocate_count is None else {MAIN_POOL: pool.max_colocate_count},
        isolate_gpus=pool.isolate_gpus,
        threads=pool.threads,
        spare_bundles=pool.spare_bundles,
        logs=None if config.run_dir is None else Path(config.run_dir, "logs"),
    )


def pool_errors(config: RunConfig, roles: Iterable[Role]) -> list[ConfigError]:
    """Return what is wrong with the roles of the pools, and with the slots of ``pool``.

    Every role of another pool is one of the run, and in one pool; every role has a slot.

    Args:
        config: the configuration of the run.
        roles: the roles that have a group.
    """
    groups = {CONFIG_KEYS[role] for role in roles}
    errors = []
    pool_of: dict[str, str] = {}
    for name, pool in config.pools.items():
        if name == MAIN_POOL:
            text = f"pools.{name} has the name of the pool of all other roles: choose another name"
            errors.append(ConfigError(text, key=f"pools.{name}", value=name))
            continue
        for role in pool.roles or [name]:
            if rule := _broken_rule(role, name, groups, pool_of, named=bool(pool.roles)):
                key = f"pools.{name}.roles" if pool.roles else f"pools.{name}"
                errors.append(ConfigError(f"{key} has the role {role!r}, {rule}", key=key, value=role))
            pool_of.setdefault(role, name)
    return errors + _without_slot(config.pool.max_colocate_count, groups - pool_of.keys())


def check_layout(config: RunConfig, key: str) -> None:
    """Raise LayoutError if the axes of a role, given by its key, do not divide its pool."""
    bundles, pool = len(nodes_of_ranks(config, key)), pool_names(config)[key]
    try:
        config.sections()[key].parallel.layout(bundles)
    except LayoutError as error:
        on = "a pool" if pool == MAIN_POOL else f"the pool {pool!r}"
        raise LayoutError(f"{key} on {on} of {bundles} bundles: {error}", **error.fields) from error


def _broken_rule(role: str, pool: str, groups: Collection[str], pool_of: Mapping[str, str], *, named: bool) -> str:
    """Return why a role cannot be in a pool, and what to set; an empty string if it can."""
    if role not in OWN_POOL_ROLES:
        possible = f"{close_names(role, OWN_POOL_ROLES)}; possible: {', '.join(OWN_POOL_ROLES)}"
        other = "" if named else f". A pool with another name has a list of its roles: set pools.{pool}.roles"
        return f"which cannot have a separate pool{possible}{other}"
    if role in pool_of:
        return f"and so has pools.{pool_of[role]}: expected one pool for each role"
    return "" if role in groups else f"and {ADD_ROLE[role]}; or remove the role from pools"


def _without_slot(slots: int | None, roles: Collection[str]) -> list[ConfigError]:
    """Return an error if ``pool`` has fewer slots than roles."""
    if slots is None or slots >= len(roles):
        return []
    names = ", ".join(role for role in ROLES if role in roles)
    text = (
        f"pool.max_colocate_count is {slots}, and {len(roles)} roles are in the pool, each with a process in every "
        f"bundle: {names}. Remove pool.max_colocate_count, or set it to {len(roles)} or more"
    )
    return [ConfigError(text, key="pool.max_colocate_count", value=slots)]
