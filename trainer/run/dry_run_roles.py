"""The calls of the roles of a run that ``dry-run`` makes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from parallel_state.dry_run.outcome import Outcome
from parallel_state.dry_run.run import dry_run_of
from trainer.roles import CONFIG_KEYS, Role, role_workers
from trainer.run.check_report import lengths_of, pool_size
from trainer.run.config import RunConfig
from trainer.run.parts import roles_of
from trainer.run.verified_roles import without_weights
from workers.dry_run import RoleCall
from workers.verify.roles import variant_of

_SCORES = {"actor": "compute_log_prob", "ref": "compute_ref_log_prob"}


def role_calls(config: RunConfig) -> dict[str, Callable[..., Outcome]]:
    """Return what runs each call of each role, by its name; its arguments are those of ``dry_run_of``.

    A rollout is left out: engines have their own memory, and generation with Megatron needs values.

    Args:
        config: the configuration of the run.

    Raises:
        LayoutError: the axes of a role do not divide its pool.
    """
    calls: dict[str, Callable[..., Outcome]] = {}
    lengths = lengths_of(config, config.sections())
    for worker in role_workers(without_weights(config), roles_of(config)):
        if worker.role is Role.Rollout:
            continue
        key = CONFIG_KEYS[worker.role]
        section: Any = worker.init.kwargs["config"]
        layout = section.parallel.layout(pool_size(config, key))
        roles = "_".join(part for part in str(worker.init.kwargs.get("role", "")).split("_") if part != "rollout")
        for method in _methods(section, roles):
            call = RoleCall(worker.init.cls, section, roles, method, layout, lengths.prompt, lengths.response)
            calls[f"{key}.{method}"] = partial(dry_run_of, call, variant_of(section, layout))
    return calls


def _methods(section: Any, roles: str) -> list[str]:
    if roles:
        update = ["update_actor"] if "actor" in roles.split("_") else []
        return update + [method for role, method in _SCORES.items() if role in roles.split("_")]
    return ["update_critic", "compute_values"] if hasattr(section, "optim") else ["compute_rm_score"]
