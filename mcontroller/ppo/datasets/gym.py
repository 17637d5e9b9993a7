"""Problems of reasoning-gym: different questions, in the order in which the task draws them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcontroller.config.checks import close_names
from mcontroller.errors import ConfigError
from mcontroller.ppo.datasets.config import DatasetConfig
from mcontroller.ppo.datasets.gym_package import import_reasoning_gym
from mcontroller.ppo.datasets.records import DATASET_SOURCES, Records

__all__ = ["read_reasoning_gym"]

SEED_DISTANCE = 10_000_019
"""Distance of seeds: reasoning-gym draws problem i from ``seed + i``, so seeds this far apart share no draw."""


@DATASET_SOURCES.register("reasoning_gym")
def read_reasoning_gym(config: DatasetConfig) -> Records:
    """Return ``skip + size`` different questions with their answers; ``entry`` is what the task's scorer reads.

    Two data sets of the same task, options and seed that select different rows share no question.

    Raises:
        ConfigError: reasoning-gym does not have the task or an option, or the task has too few questions.
    """
    if config.size < 1:
        raise ConfigError(f"source 'reasoning_gym' needs a size of at least 1; it is {config.size}", key="size")
    wanted = config.skip + config.size
    most_draws = 50 * wanted
    dataset = _task(config, most_draws)
    different: dict[str, Mapping[str, Any]] = {}
    for draw in range(most_draws):
        entry = dataset[draw]
        different.setdefault(entry["question"], entry)
        if len(different) == wanted:
            break
    if len(different) < wanted:
        raise ConfigError(
            f"{config.task} has {len(different)} different questions in {most_draws} draws; skip {config.skip} + size "
            f"{config.size} = {wanted}: reduce the sizes, or change options",
            key="size",
            value=config.size,
        )
    rows = [{"prompt": entry["question"], "answer": entry["answer"], "entry": entry} for entry in different.values()]
    return Records(f"reasoning-gym's {config.task}", rows, [f"problem {number}" for number in range(wanted)])


def _task(config: DatasetConfig, size: int) -> Any:
    gym = import_reasoning_gym()
    tasks = gym.factory.DATASETS
    if config.task not in tasks:
        hint = close_names(str(config.task), tasks)
        raise ConfigError(f"reasoning-gym has no task {config.task!r}{hint}", key="task", value=config.task)
    possible = tasks[config.task][1].__dataclass_fields__
    for name in config.options:
        if name not in possible:
            raise ConfigError(
                f"{config.task} has no option {name!r}{close_names(name, possible)}; it has {', '.join(possible)}",
                key=f"options.{name}",
            )
    return gym.create_dataset(config.task, seed=config.seed * SEED_DISTANCE, size=size, **config.options)
