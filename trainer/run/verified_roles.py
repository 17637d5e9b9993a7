"""The roles of a run as programs that ``verify`` trains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainer.roles import CONFIG_KEYS, Role, role_workers
from trainer.run.check_report import pool_size
from trainer.run.config import RunConfig
from trainer.run.parts import roles_of
from workers.verify.roles import RoleProgram, TrainedRole, parallel_config, variant_of
from workers.verify.sizes import small_layout, small_model


def role_programs(config: RunConfig, *, most_ranks: int = 8, shrinks: bool = True) -> dict[str, RoleProgram]:
    """Return the roles of a run as programs, by their keys in the configuration; ``role.variant`` is the layout.

    A rollout is left out: it has the weights of the actor.

    Args:
        config: the configuration of the run.
        most_ranks: axes are halved until a layout has no more ranks, or all of them are 2.
        shrinks: whether to make models and layouts small.

    Raises:
        LayoutError: the axes of a role do not divide its pool.
        ConfigError: a worker cannot build the small model; the message names the field.
    """
    programs = {}
    for worker in role_workers(without_weights(config), roles_of(config)):
        if worker.role is Role.Rollout:
            continue
        key = CONFIG_KEYS[worker.role]
        section: Any = worker.init.kwargs["config"]
        layout = section.parallel.layout(pool_size(config, key))
        layout = small_layout(layout, most_ranks) if shrinks else layout
        model = small_model(section.model, layout) if shrinks else section.model
        variant = variant_of(section, layout)
        section = replace(section, model=model, parallel=parallel_config(layout, variant.sequence_parallel))
        roles = "_".join(part for part in str(worker.init.kwargs.get("role", "")).split("_") if part != "rollout")
        count = 2 * layout.dp * (layout.pp if layout.vpp else 1)
        programs[key] = RoleProgram.of(TrainedRole(worker.init.cls, section, roles, variant), max(count, 4))
    return programs


def without_weights(config: RunConfig) -> RunConfig:
    """Return the run with random weights: a directory of Hugging Face may have its ``config.json`` alone."""
    sections: dict[str, Any] = {
        key: replace(section, model=replace(section.model, hf_path=None)) for key, section in config.sections().items()
    }
    return replace(config, **sections)
