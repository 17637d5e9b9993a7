"""The record of a run, ``trainer.json``: the last save, the earlier ones, and what a save has still to do.

The file is replaced atomically. It is the point at which a save counts: before, the run has the earlier checkpoints,
and afterwards the new ones, wherever the save is interrupted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path, PurePosixPath
from typing import Any

from mcontroller.data.batch import DataProto
from mcontroller.errors import DataError
from mcontroller.files import replace_text, sha256_of, sync_directory

RECORD = "trainer.json"


@dataclass(frozen=True)
class BatchInFlight:
    """A batch whose responses were generated ahead.

    Attributes:
        number: of its problems in the sequence of the data set.
        responses: the responses, with all columns.
        rows: the positions of its problems in the data, see ``BatchStream``.
    """

    number: int
    responses: DataProto
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class SavedBatch:
    """The record of a saved batch.

    Attributes:
        number: of its problems in the sequence of the data set.
        sha256: of its file.
        rows: see ``BatchInFlight``.
    """

    number: int
    sha256: str
    rows: tuple[int, ...] = ()


def write_batches(directory: Path, batches: Sequence[BatchInFlight]) -> tuple[SavedBatch, ...]:
    """Write a file for each batch into a new directory, and return what is recorded of them.

    Raises:
        DataError: a value of a batch cannot be stored in a file.
    """
    directory.mkdir(parents=True)
    saved = []
    for batch in batches:
        path = _path(directory, batch.number)
        batch.responses.save_to_disk(path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        saved.append(SavedBatch(batch.number, sha256_of(path), batch.rows))
    sync_directory(directory)
    return tuple(saved)


def read_batches(directory: Path, saved: Sequence[SavedBatch]) -> tuple[BatchInFlight, ...]:
    """Return the batches of a directory.

    Raises:
        DataError: a file is missing or damaged.
    """
    batches = []
    for record in saved:
        path = _path(directory, record.number)
        if not path.is_file():
            raise DataError(f"{path} does not exist", path=str(path))
        sha256 = sha256_of(path)
        if sha256 != record.sha256:
            text = f"{path} is damaged: its SHA-256 is {sha256}, expected {record.sha256}"
            raise DataError(text, path=str(path))
        batches.append(BatchInFlight(record.number, DataProto.load_from_disk(path), record.rows))
    return tuple(batches)


def _path(directory: Path, number: int) -> Path:
    return directory / f"batch_{number}.pt"


@dataclass(frozen=True)
class RunState:
    """The controller's own state.

    Attributes:
        global_steps: steps of PPO done.
        kl_coef: weight of the KL penalty.
        drawn_batches: batches of problems that were drawn; more than the steps with dynamic sampling.
        num_tokens: tokens of prompts and responses so far.
        program: the state of the program that runs the trainer, as JSON.
        rollout: the state of sampling of a separate rollout group, as JSON.
        in_flight: the batches whose responses were generated and not yet trained on.
        next_row: position in the data of the first row that was not drawn.
        batch_size: problems of a batch.
        value: ``trainer.best_metric`` at this step; None if it was not measured.
        best_metric: the name of the metric of ``value``.
    """

    global_steps: int
    kl_coef: float
    drawn_batches: int = 0
    num_tokens: int = 0
    program: Mapping[str, Any] = field(default_factory=dict)
    rollout: Mapping[str, Any] = field(default_factory=dict)
    in_flight: tuple[BatchInFlight, ...] = ()
    next_row: int = 0
    batch_size: int = 0
    value: float | None = None
    best_metric: str | None = None


@dataclass(frozen=True)
class SavedStep:
    """A save of all groups.

    Attributes:
        groups: the directory of each group's checkpoint, relative to that of the run.
        state: of the controller, without the batches in flight.
        in_flight: the batches whose responses were generated and not yet trained on.
    """

    groups: Mapping[str, str]
    state: RunState
    in_flight: tuple[SavedBatch, ...] = ()


@dataclass(frozen=True)
class RunRecord:
    """The content of ``trainer.json``.

    Attributes:
        last: the last save.
        earlier: the saves before it that are kept, the newest first.
        staged: the name of the directories in which the last save was written, beside its places, and from which it is
            still to be moved; empty: it has been.
        obsolete: directories that are still to be deleted.
    """

    last: SavedStep
    earlier: tuple[SavedStep, ...] = ()
    staged: str = ""
    obsolete: tuple[str, ...] = ()

    def saves(self) -> tuple[SavedStep, ...]:
        """Return all saves, the newest first."""
        return (self.last, *self.earlier)

    def locate(self, directory: Path, save: SavedStep, group: str) -> Path:
        """Return the directory of a group's checkpoint now, whether or not it has been moved to its place."""
        place = directory / save.groups[group]
        staged = place.parent / self.staged / place.name
        return staged if save is self.last and staged.exists() else place


def checked_program(program: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of the program if JSON can represent it.

    Raises:
        DataError: it cannot; with the key of the object whose state it is.
    """
    for key, value in program.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            text = f"the state_dict() of stateful[{key!r}] cannot be saved as JSON: {error}"
            raise DataError(text, key=key) from error
    return program


def write_record(directory: Path, record: RunRecord) -> None:
    """Replace the record of the run in ``directory``."""
    content = _json_of(record.last) | {"earlier": [_json_of(save) for save in record.earlier]}
    if record.staged or record.obsolete:
        content |= {"staged": record.staged, "obsolete": list(record.obsolete)}
    replace_text(directory / RECORD, json.dumps(content, indent=1))


def _json_of(save: SavedStep) -> dict[str, Any]:
    state = replace(save.state, in_flight=save.in_flight)  # type: ignore[arg-type]  # the record of the batches
    return {"groups": save.groups, **asdict(state)}


def read_record(directory: Path) -> RunRecord:
    """Return the record of the run in ``directory``.

    Raises:
        DataError: the file does not exist or is damaged; the text names the value.
    """
    path = directory / RECORD
    if not path.is_file():
        raise DataError(f"there is no checkpoint to resume from: {path} does not exist", path=str(path))
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        obsolete, staged = dict(enumerate(content.get("obsolete", ()))), content.get("staged", "")
        if PurePosixPath(staged).name != staged or staged == "..":
            raise ValueError(f"staged is {staged!r:.100}, expected the name of a directory")
        return RunRecord(
            last=_saved_step(directory, content),
            earlier=tuple(_saved_step(directory, save) for save in content.get("earlier", ())),
            staged=staged,
            obsolete=tuple(_directories(directory, "obsolete", obsolete).values()),
        )
    except (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"the record of the run, {path}, is damaged: {reason}", path=str(path)) from error


def _saved_step(directory: Path, content: Mapping[str, Any]) -> SavedStep:
    for name in ("global_steps", "drawn_batches", "num_tokens", "next_row", "batch_size"):
        if type(content[name]) is not int or content[name] < 0:
            raise ValueError(f"{name} is {content[name]!r:.100}, expected a number of at least 0")
    known = {item.name: content[item.name] for item in fields(RunState) if item.name in content}
    state = RunState(**known | {"in_flight": (), "kl_coef": float(content["kl_coef"])})
    batches = tuple(
        SavedBatch(int(batch["number"]), str(batch["sha256"]), tuple(map(int, batch["rows"])))
        for batch in content["in_flight"]
    )
    return SavedStep(_directories(directory, "groups", content["groups"]), state, batches)


def _directories(directory: Path, name: str, content: Mapping[Any, str]) -> dict[Any, str]:
    """Check that all values are paths inside the directory of the run: they are loaded, moved and deleted."""
    for place in content.values():
        inside = isinstance(place, str) and place not in ("", ".")
        if not inside or PurePosixPath(place).is_absolute() or ".." in PurePosixPath(place).parts:
            raise ValueError(f"{name} has {place!r:.100}, expected a relative path inside the run's directory")
        if outside := outside_of(directory, place):
            raise ValueError(f"{name} has {place!r:.100}, which leads to {outside}, outside of the run's directory")
    return dict(content)


def outside_of(directory: Path, place: str) -> str:
    """Return where a path leads that leaves ``directory`` through a link; "" if it does not."""
    real = os.path.realpath(directory / place)
    return "" if Path(real).is_relative_to(os.path.realpath(directory)) else real
