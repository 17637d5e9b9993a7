"""The rows that a run trains on, in its checkpoints: a run that resumes or replays another one draws the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcontroller.errors import DataError
from trainer.data.config import DatasetConfig
from trainer.data.prompts import PromptRows
from trainer.run.config import RunConfig
from trainer.saving.run_record import RECORD, read_record

DATA = "data"
"""The key of the rows in the state of the program of a checkpoint."""


class RecordedRows:
    """The number and the checksum of the rows of each training set, as a stateful object of ``RayPPOTrainer``.

    Args:
        config: the configuration of the run.
        prompts: the problems of the data sets by their keys in the configuration.
    """

    def __init__(self, config: RunConfig, prompts: Mapping[str, PromptRows]) -> None:
        self._state = {
            key: {"source": _source(dataset), "rows": len(prompts[key]), "crc32": prompts[key].crc32()}
            for key, dataset in config.data.training_sets().items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return, for each training set, what selects its rows, their number and their checksum."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: ``keep_recorded_rows`` has compared them before a process was started."""


def keep_recorded_rows(config: RunConfig, prompts: Mapping[str, PromptRows]) -> None:
    """Leave out rows that were appended to the training sets of a run that is resumed or replayed.

    The order in which rows are drawn depends on their number. Data sets with another path or selection than that of the
    run are used as they are.

    Args:
        config: the configuration of the run.
        prompts: the problems of the data sets by their keys in the configuration.

    Raises:
        DataError: rows of the run were removed or changed; or the record of its saves is damaged.
    """
    trainer = config.trainer
    directory = Path(config.run_dir or ".", trainer.asynchronous.replay or trainer.default_local_dir)
    is_new = not trainer.resume and trainer.asynchronous.replay is None
    if is_new or not (directory / RECORD).is_file():
        return
    by_key = read_record(directory).last.state.program.get(DATA)
    for key, dataset in config.data.training_sets().items():
        recorded = by_key.get(key) if isinstance(by_key, Mapping) else None
        match recorded:  # None in a checkpoint of an earlier version, or of another program
            case {"source": source, "rows": int(rows), "crc32": crc32} if key in prompts and source == _source(dataset):
                _keep(key, prompts[key], rows, crc32, directory)


def _keep(key: str, prompts: PromptRows, rows: int, crc32: Any, directory: Path) -> None:
    count = len(prompts)
    if count >= rows and prompts.crc32(rows) == crc32:
        prompts.keep(rows)
        return
    fewer = f"{key} has {count} prompts, fewer than"
    changed = f"{key} has {count} prompts, and its first {rows}, or their answers, differ from"
    raise DataError(
        f"{fewer if count < rows else changed} the {rows} that the run in {directory} began with, so it would go on "
        f"with other rows: restore the file; or pass a copy of it as {key}.path=COPY to go on with its rows",
        key=key,
        rows=count,
        expected=rows,
    )


def _source(dataset: DatasetConfig) -> list[Any]:
    """Return what selects the rows of a data set, as JSON."""
    paths = [path if path is None else str(Path(str(path)).absolute()) for path in dataset.paths]
    return [
        dataset.source,
        paths,
        dataset.split,
        dataset.task,
        dataset.options,
        dataset.seed,
        dataset.skip,
        dataset.size,
    ]
