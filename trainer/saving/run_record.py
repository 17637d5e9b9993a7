"""The record of a run, ``trainer.json``: the last save, the earlier ones, and what a save has still to do.

The file is replaced atomically. It is the point at which a save counts: before, the run has the earlier checkpoints,
and afterwards the new ones, wherever the save is interrupted.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path, PurePosixPath
from typing import Any

from mcontroller.data.batch import DataProto
from mcontroller.errors import DataError
from mcontroller.files import replace_text, sha256_of, sync_directory
from trainer.data.stream import BatchStream

RECORD = "trainer.json"


@dataclass(frozen=True)
class BatchInFlight:
    """A batch whose responses were generated ahead.

    Attributes:
        number: of its problems in the sequence of the data set.
        responses: the responses, with all columns.
        problems: which of its problems have responses that were not trained on; None: all.
        rows: the positions of its problems in the data, see ``BatchStream``.
    """

    number: int
    responses: DataProto
    problems: tuple[int, ...] | None = None
    rows: tuple[int, ...] = ()

    def rows_in_flight(self) -> list[int]:
        """Return the positions of the problems that were not trained on."""
        return list(self.rows if self.problems is None else [self.rows[problem] for problem in self.problems])


@dataclass(frozen=True)
class SavedBatch:
    """The record of a saved batch.

    Attributes:
        number: of its problems in the sequence of the data set.
        sha256: of its file.
        problems: see ``BatchInFlight``.
        rows: see ``BatchInFlight``.
    """

    number: int
    sha256: str
    problems: tuple[int, ...] | None = None
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
        saved.append(SavedBatch(batch.number, sha256_of(path), batch.problems, batch.rows))
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
        batches.append(BatchInFlight(record.number, DataProto.load_from_disk(path), record.problems, record.rows))
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
        pending: positions before ``next_row`` of rows that were neither trained on nor are in flight.
        value: ``trainer.best_metric`` at this step; None if it was not measured.
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
    pending: tuple[int, ...] = ()
    value: float | None = None

    def in_flight_in(self, batches: BatchStream) -> tuple[BatchInFlight, ...]:
        """Return the batches in flight, and have their rows in ``batches``; none if these have another size."""
        rows = {batch.number: batch.rows for batch in self.in_flight}
        batches.resume(self.drawn_batches, self.next_row, self.pending, rows)
        return self.in_flight if self.batch_size == batches.batch_size else ()

    def continue_after(self, batches: BatchStream, kept: int) -> int:
        """Continue ``batches`` after the rows that were trained on or are in flight; return the number of the next.

        Args:
            batches: after ``in_flight_in``.
            kept: batches in flight; 0: the rows of those that were in flight are read again.
        """
        if kept or not self.in_flight:
            return self.drawn_batches
        first = self.drawn_batches - len(self.in_flight)
        again = sorted(row for batch in self.in_flight for row in batch.rows_in_flight())
        batches.resume(first, self.next_row, [*again, *self.pending])
        return first


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
        staged: by group, the directory in which the last save was written and from which it is still to be moved.
        obsolete: directories that are still to be deleted.
    """

    last: SavedStep
    earlier: tuple[SavedStep, ...] = ()
    staged: Mapping[str, str] = field(default_factory=dict)
    obsolete: tuple[str, ...] = ()

    def saves(self) -> tuple[SavedStep, ...]:
        """Return all saves, the newest first."""
        return (self.last, *self.earlier)

    def locate(self, directory: Path, save: SavedStep, group: str) -> Path:
        """Return the directory of a group's checkpoint now, whether or not it has been moved to its place."""
        place = directory / save.groups[group]
        if save is self.last and group in self.staged:
            staged = directory / self.staged[group] / place.name
            return staged if staged.exists() else place
        return place


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
        content |= {"staged": dict(record.staged), "obsolete": list(record.obsolete)}
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
    except (ValueError, RecursionError, OSError) as error:
        raise _damaged(path, f"it is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise _damaged(path, f"expected an object, got {type(content).__name__}")
    earlier, obsolete = content.get("earlier", []), content.get("obsolete", [])
    if not isinstance(earlier, list) or not isinstance(obsolete, list):
        raise _damaged(path, "earlier and obsolete must be lists")
    last = _saved_step(path, content)
    return RunRecord(
        last=last,
        earlier=tuple(_saved_step(path, save) for save in earlier),
        staged=_directories(path, "staged", content.get("staged", {})),
        obsolete=tuple(_directories(path, "obsolete", dict(enumerate(obsolete))).values()),
    )


def _saved_step(path: Path, content: Any) -> SavedStep:
    if not isinstance(content, dict):
        raise _damaged(path, f"expected an object for each save, got {type(content).__name__}")
    for name in ("global_steps", "drawn_batches", "num_tokens", "next_row", "batch_size"):
        _check(path, name, content.get(name), int)
    _check(path, "kl_coef", content.get("kl_coef"), int | float)
    if content.get("value") is not None:
        _check(path, "value", content["value"], int | float, least=-math.inf)
    for name in ("program", "rollout"):
        if not isinstance(content.get(name), dict):
            raise _damaged(path, f"{name} is {content.get(name)!r:.100}, expected an object")
    known = {item.name: content[item.name] for item in fields(RunState) if item.name in content}
    pending = _counts(path, "pending", content.get("pending"))
    state = RunState(**known | {"pending": pending, "in_flight": (), "kl_coef": float(content["kl_coef"])})
    return SavedStep(_directories(path, "groups", content.get("groups")), state, _batches(path, content))


def _check(path: Path, name: str, number: Any, kind: Any, *, least: float = 0) -> None:
    """Raise DataError unless ``number`` is finite, of this kind, and not below ``least``."""
    if isinstance(number, bool) or not isinstance(number, kind) or not least <= number < math.inf:
        raise _damaged(path, f"{name} is {number!r:.100}, expected a finite number of at least {least}")


def _counts(path: Path, name: str, content: Any) -> tuple[int, ...]:
    if not isinstance(content, list) or not all(type(count) is int and count >= 0 for count in content):
        raise _damaged(path, f"{name} is {content!r:.100}, expected a list of counts")
    return tuple(content)


def _batches(path: Path, content: Mapping[str, Any]) -> tuple[SavedBatch, ...]:
    batches = content.get("in_flight")
    if not isinstance(batches, list) or not all(isinstance(batch, dict) for batch in batches):
        raise _damaged(path, f"in_flight is {batches!r:.100}, expected a list of objects")
    saved = []
    for batch in batches:
        _check(path, "number of in_flight", batch.get("number"), int)
        if not isinstance(batch.get("sha256"), str):
            raise _damaged(path, f"sha256 of in_flight is {batch.get('sha256')!r:.100}, expected a string")
        rows = _counts(path, "rows of in_flight", batch.get("rows"))
        problems = batch.get("problems")
        if problems is not None and any(row >= len(rows) for row in _counts(path, "problems of in_flight", problems)):
            raise _damaged(path, f"problems of in_flight is {problems!r:.100}, expected counts below {len(rows)}")
        saved.append(SavedBatch(batch["number"], batch["sha256"], None if problems is None else tuple(problems), rows))
    return tuple(saved)


def _directories(path: Path, name: str, content: Any) -> dict[Any, str]:
    """Check that all values are paths inside the directory of the run: they are loaded, moved and deleted."""
    if not isinstance(content, dict):
        raise _damaged(path, f"{name} is {content!r:.100}, expected an object of directories")
    for place in content.values():
        inside = isinstance(place, str) and "\0" not in place and place not in ("", ".")
        if not inside or PurePosixPath(place).is_absolute() or ".." in PurePosixPath(place).parts:
            raise _damaged(path, f"{name} has {place!r:.100}, expected a relative path inside the run's directory")
        try:
            outside = outside_of(path.parent, place)
        except ValueError as error:  # half of a surrogate pair
            raise _damaged(path, f"{name} has {place!r:.100}: {error}") from error
        if outside:
            raise _damaged(path, f"{name} has {place!r:.100}, which leads to {outside}, outside of the run's directory")
    return content


def outside_of(directory: Path, place: str) -> str:
    """Return where a path leads that leaves ``directory`` through a link; "" if it does not."""
    real = os.path.realpath(directory / place)
    return "" if Path(real).is_relative_to(os.path.realpath(directory)) else real


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(f"the record of the run, {path}, is damaged: {reason}", path=str(path))
