"""The roles of a run that have a model: as programs that ``verify`` trains, and as calls that ``dry-run`` makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainer.roles import CONFIG_KEYS, role_workers
from trainer.run.config import RunConfig
from trainer.run.parts import roles_of
from trainer.run.pools import nodes_of_ranks, pool_names, pool_nodes
from workers.dry_run import RoleCall
from workers.role_calls import Lengths, calls_of_roles
from workers.verify.roles import ModelRole, RoleProgram, parallel_config, variant_of
from workers.verify.sizes import small_layout, small_model


def model_roles(config: RunConfig) -> dict[str, ModelRole]:
    """Return the roles of a run with random weights, by their keys in the configuration.

    A directory of Hugging Face may have its ``config.json`` alone.

    Args:
        config: the configuration of the run.

    Raises:
        LayoutError: the axes of a role do not divide its pool.
    """
    names, nodes = pool_names(config), pool_nodes(config)
    sections: dict[str, Any] = {
        key: replace(section, model=replace(section.model, hf_path=None)) for key, section in config.sections().items()
    }
    specs = role_workers(replace(config, **sections), roles_of(config))
    roles = {}
    for spec in specs:
        key, parts = CONFIG_KEYS[spec.role], str(spec.init.kwargs.get("role", ""))
        roles[key] = ModelRole.of(spec.init.cls, spec.config, parts, sum(nodes[names[key]]))
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
    for key, worker_role in model_roles(config).items():
        if key == "rollout":  # it has the weights of the actor
            continue
        role = worker_role.without("rollout")
        section, layout = role.config, role.variant.layout
        layout = small_layout(layout, most_ranks) if shrinks else layout
        model = small_model(section.model, layout) if shrinks else section.model
        variant = variant_of(section, layout)
        section = replace(section, model=model, parallel=parallel_config(layout, variant.sequence_parallel))
        count = 2 * layout.dp * (layout.pp if layout.vpp else 1)
        programs[key] = RoleProgram.of(replace(role, config=section, variant=variant), max(count, 4))
    return programs


def role_calls(config: RunConfig) -> dict[str, RoleCall]:
    """Return the calls of the roles of a run; see ``calls_of_roles``.

    Raises:
        LayoutError: the axes of a role do not divide its pool.
    """
    roles = model_roles(config)
    nodes = {key: nodes_of_ranks(config, key) for key in roles}
    return calls_of_roles(roles, lengths_of(config), nodes)


def lengths_of(config: RunConfig) -> Lengths:
    """Return the lengths of the rows of a run, and how many responses a step has."""
    rollout = config.actor_rollout_ref.rollout
    return Lengths(rollout.prompt_length, rollout.response_length, config.data.train_batch_size * rollout.n)
