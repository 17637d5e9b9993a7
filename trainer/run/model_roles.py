"""The roles of a run that have a model: as programs that ``verify`` trains, and as calls that ``dry-run`` makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from parallel_state.dry_run.outcome import Outcome
from parallel_state.dry_run.run import dry_run_of
from trainer.roles import CONFIG_KEYS, role_workers
from trainer.run.check_report import lengths_of, pool_size
from trainer.run.config import RunConfig
from trainer.run.parts import roles_of
from workers.dry_run import RoleCall
from workers.generate.engines import ROLLOUT_ENGINES
from workers.verify.roles import ModelRole, RoleProgram, parallel_config, variant_of
from workers.verify.sizes import small_layout, small_model


def model_roles(config: RunConfig) -> dict[str, ModelRole]:
    """Return the roles of a run with random weights, by their keys in the configuration.

    A directory of Hugging Face may have its ``config.json`` alone. A rollout is left out: it has the weights of the
    actor.

    Args:
        config: the configuration of the run.

    Raises:
        LayoutError: the axes of a role do not divide its pool.
    """
    return {
        key: replace(role, roles="_".join(part for part in role.roles.split("_") if part != "rollout"))
        for key, role in _all_roles(config).items()
        if key != "rollout"
    }


def _all_roles(config: RunConfig) -> dict[str, ModelRole]:
    sections: dict[str, Any] = {
        key: replace(section, model=replace(section.model, hf_path=None)) for key, section in config.sections().items()
    }
    roles = {}
    for worker in role_workers(replace(config, **sections), roles_of(config)):
        key = CONFIG_KEYS[worker.role]
        section: Any = worker.init.kwargs["config"]
        variant = variant_of(section, section.parallel.layout(pool_size(config, key)))
        roles[key] = ModelRole(worker.init.cls, section, str(worker.init.kwargs.get("role", "")), variant)
    return roles


def role_programs(config: RunConfig, *, most_ranks: int = 8, shrinks: bool = True) -> dict[str, RoleProgram]:
    """Return the roles of a run as programs, by their keys in the configuration; ``role.variant`` is the layout.

    Args:
        config: the configuration of the run.
        most_ranks: axes are halved until a layout has no more ranks, or all of them are 2.
        shrinks: whether to make models and layouts small.

    Raises:
        LayoutError: the axes of a role do not divide its pool.
        ConfigError: a worker cannot build the small model; the message names the field.
    """
    programs = {}
    for key, role in model_roles(config).items():
        section, layout = role.config, role.variant.layout
        layout = small_layout(layout, most_ranks) if shrinks else layout
        model = small_model(section.model, layout) if shrinks else section.model
        variant = variant_of(section, layout)
        section = replace(section, model=model, parallel=parallel_config(layout, variant.sequence_parallel))
        count = 2 * layout.dp * (layout.pp if layout.vpp else 1)
        programs[key] = RoleProgram.of(replace(role, config=section, variant=variant), max(count, 4))
    return programs


def role_calls(config: RunConfig) -> dict[tuple[str, str], Callable[..., Outcome]]:
    """Return what runs each call of each role, by the role's key and the method; arguments are as of ``dry_run_of``.

    Args:
        config: the configuration of the run.

    Raises:
        LayoutError: the axes of a role do not divide its pool.
    """
    lengths = lengths_of(config, config.sections())
    calls: dict[tuple[str, str], Callable[..., Outcome]] = {}
    roles = model_roles(config)
    for key, role in roles.items():
        for method in (*role.updates, *role.scores):
            call = RoleCall(role, method, lengths.prompt, lengths.response)
            # on all ranks, one call of each role: a forward pass to score is part of an update
            small = call.small() if method == (*role.updates, *role.scores)[0] else None
            calls[key, method] = partial(dry_run_of, call, role.variant, small=small)
    for key, role in _all_roles(config).items():
        if "rollout" not in role.roles:
            continue
        if ROLLOUT_ENGINES.get_or_raise(role.config.rollout.engine).in_worker:
            call = lengths.generation(role)
        elif "actor" in role.roles and role.variant.layout.tp == 1 and role.variant.layout.etp in (None, 1):
            # otherwise a tensor's parts are also on ranks that do not run
            call = RoleCall(roles[key], "rollout_weights", lengths.prompt, lengths.response)
        else:
            continue
        calls[key, call.method] = partial(dry_run_of, call, role.variant)
    return calls
