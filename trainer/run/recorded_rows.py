"""The rows that a run trains on, in its checkpoints: a run that resumes or replays another one draws the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
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
            key: {
                "source": {item.name: getattr(dataset, item.name) for item in fields(DatasetConfig)},
                "rows": len(prompts[key]),
                "crc32": prompts[key].crc32(),
            }
            for key, dataset in config.data.training_sets().items()
            if key in prompts
        }

    def state_dict(self) -> dict[str, Any]:
        """Return, for each training set, what selects its rows, their number and their checksum."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: ``check_recorded_rows`` has compared them before a process was started."""


def check_recorded_rows(config: RunConfig, prompts: Mapping[str, PromptRows]) -> None:
    """Raise DataError if rows of the training sets of a run that is resumed or replayed were added, removed or changed.

    The order in which rows are drawn depends on their number. Data sets with another path or selection than that of the
    run are used as they are.

    Args:
        config: the configuration of the run.
        prompts: the problems of the data sets by their keys in the configuration.
    """
    trainer = config.trainer
    directory = Path(config.run_dir or ".", trainer.asynchronous.replay or trainer.default_local_dir)
    is_new = not trainer.resume and trainer.asynchronous.replay is None
    if is_new or not (directory / RECORD).is_file():
        return
    by_key = read_record(directory).last.state.program.get(DATA, {})
    for key, now in RecordedRows(config, prompts).state_dict().items():
        before = by_key.get(key, now)  # of a checkpoint of another program
        if before["source"] == now["source"] and before != now:
            raise DataError(
                f"{key} has {now['rows']} prompts, and they, or their answers, are not the {before['rows']} that the "
                f"run in {directory} began with, so it would go on with other rows: restore the file; or pass a copy "
                f"of it as {key}.path=COPY to go on with its rows",
                key=key,
                rows=now["rows"],
                expected=before["rows"],
            )
