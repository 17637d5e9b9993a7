"""Records of a configured data set."""

from __future__ import annotations

from pathlib import Path

from mcontroller.errors import ConfigError
from mcontroller.ppo.datasets import gym  # noqa: F401  # registers its source
from mcontroller.ppo.datasets.config import DatasetConfig
from mcontroller.ppo.datasets.files import source_of_path
from mcontroller.ppo.datasets.records import DATASET_SOURCES, Records

__all__ = ["load_records"]


def load_records(config: DatasetConfig, key: str) -> Records:
    """Return the rows of a data set that ``skip`` and ``size`` select.

    Args:
        config: the data set.
        key: its key in the configuration, for error messages.

    Raises:
        ConfigError: there is no such reader, file or task, or an extra is missing.
        DataError: the content cannot be read, with the file and the line or row.
    """
    name = config.source
    if name is None:
        if config.path is None:
            raise ConfigError(f"{key} has no path: set {key}.path to a JSONL or Parquet file", key=f"{key}.path")
        name = source_of_path(Path(config.path))
    records = DATASET_SOURCES.get_or_raise(name, key=f"{key}.source")(config)
    return records.selected(config.skip, config.size)
