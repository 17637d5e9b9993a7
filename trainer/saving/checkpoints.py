"""Checkpoints of a run: one for each group, and the record of which of them belong together.

A save has three phases. All groups write into new directories. The record of the run is replaced, and the directories
and the ``latest`` files follow it. What is obsolete is deleted. A run that is killed at any time has a complete
checkpoint of all groups of one step, and the next save or the next ``load`` goes on from the record.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mcontroller.errors import DataError, GroupBroken, MControllerError, WorkerError
from mcontroller.files import acquire_lock, delete_obsolete, free_space, release_lock, sync_directory
from mcontroller.group import WorkerGroup
from trainer.config import TrainerConfig
from trainer.saving.run_record import (
    RECORD,
    BatchInFlight,
    RunRecord,
    RunState,
    SavedBatch,
    SavedStep,
    checked_program,
    outside_of,
    read_batches,
    read_record,
    write_batches,
    write_record,
)
from trainer.stages import SharedDevices

LOCK = "run.lock"
"""The file of the lock that the process of a run holds in its directory, and in that of its checkpoints."""

CLOSE_TIMEOUT_S = 600.0
"""Longest time in which a group writes the save in flight when the run ends."""

_STAGED = ".saving-"
_IN_FLIGHT = "in_flight"
_logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """An object of a program whose state belongs to a run, such as its own data loader."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, of values that JSON can represent."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Continue from a state."""


@dataclass(frozen=True)
class _Writing:
    """A save that the groups are writing: the directory that each reported, and the state to record."""

    state: RunState
    groups: Mapping[str, WorkerGroup]
    staged: str
    written: Mapping[str, Path]
    in_flight: tuple[SavedBatch, ...]

    def is_written(self) -> bool:
        return all(path.exists() for path in self.written.values())


class RunCheckpoints:
    """The checkpoints of a run in one directory, which this process and all workers share.

    Args:
        options: the directory of the run's checkpoints, in which every group has a directory, and which are kept.
        devices: the devices that the groups share.

    Attributes:
        saved_step: the step of the last save that this object completed; None before.
        longest: seconds of the longest save so far, from its beginning to its completion.
        damaged: by step, the damage of the saves that the last ``load`` has passed over; the next save drops them.
    """

    def __init__(self, options: TrainerConfig, devices: SharedDevices) -> None:
        self.directory = Path(options.default_local_dir)
        self._options = options
        self.devices = devices
        self.saved_step: int | None = None
        self.longest = 0.0
        self.damaged: dict[int, str] = {}
        self._began = 0.0
        self._writing: _Writing | None = None

    def begin(self, groups: Mapping[str, WorkerGroup], state: RunState, *, reshardable: bool = True) -> None:
        """Start a save of all groups, which may write in the background, after the end of the save in flight.

        Args:
            groups: the groups to save, by name.
            state: the controller's own state.
            reshardable: save distributed optimizers for any layout.

        Raises:
            DataError: a group wrote outside of the directory that it was passed, the directory of a group is a link
                that leads out of that of the run, or another process uses it.
        """
        self.finish()
        self._began = time.monotonic()
        sections = [*groups, *([_IN_FLIGHT] if state.in_flight else [])]
        for section in sections:
            if outside := outside_of(self.directory, section):
                text = f"{self.directory / section} leads to {outside}, outside of the run's directory: links to"
                raise DataError(f"{text} another disk must be links of the whole directory", path=outside)
        self.recover()
        staged = f"{_STAGED}{secrets.token_hex(4)}"
        with self._deleted_if_it_fails(staged, state.global_steps):
            written = self._write(groups, staged, state.global_steps, reshardable)
            batches: tuple[SavedBatch, ...] = ()
            if state.in_flight:
                written[_IN_FLIGHT] = self.directory / _IN_FLIGHT / staged / f"global_step_{state.global_steps}"
                batches = write_batches(written[_IN_FLIGHT], state.in_flight)
        self._writing = _Writing(replace(state, in_flight=()), dict(groups), staged, written, batches)

    def _write(self, groups: Mapping[str, WorkerGroup], staged: str, step: int, reshardable: bool) -> dict[str, Path]:
        """Save every group into its new directory and return the directories that they reported."""
        written: dict[str, Path] = {}
        for group_name, group in groups.items():
            self.devices.make_room(group.save_checkpoint)
            directory = self.directory / group_name / staged
            path = group.save_checkpoint(str(directory), step, asynchronous=True, reshardable=reshardable)[0]
            written[group_name] = Path(path)
            if written[group_name].parent != directory:
                raise DataError(
                    f"{group_name}.save_checkpoint returned {path!r}; expected a directory in {directory}",
                    role=group_name,
                    path=path,
                )
        return written

    def recover(self) -> None:
        """Complete a save that was interrupted after it was recorded, and delete the remains of those before that.

        Raises:
            DataError: another process uses the directory.
        """
        self._lock()
        record = self._record()
        if record is not None and (record.staged or record.obsolete):
            self._complete(record)
        self._delete(f"{_STAGED}*")

    def check(self, groups: Collection[str]) -> RunRecord:
        """Return the record of the run, whose saves are of the groups with these names.

        Raises:
            DataError: there is no record, it is damaged, or it names other groups.
        """
        record = read_record(self.directory)
        saved_groups = set(record.last.groups) - {_IN_FLIGHT}
        if saved_groups != set(groups):
            raise DataError(
                f"the checkpoint in {self.directory} is of a run with groups {sorted(saved_groups)}; this one has "
                f"{sorted(groups)}",
                saved=sorted(saved_groups),
                groups=sorted(groups),
            )
        return record

    def load(self, groups: Mapping[str, WorkerGroup]) -> RunState:
        """Load the last save of the run into all groups, or the newest earlier one that is whole, and return its state.

        Args:
            groups: the groups to load, by name.

        Raises:
            DataError: see ``check``; or no save is whole, or another process uses the directory. Nothing has changed.
        """
        self._lock()
        record = self.check(groups)
        save, paths, batches, self.damaged = newest_whole_save(self.directory, record, groups)
        for step, damage in self.damaged.items():
            _logger.warning("the checkpoint of step %d is damaged, all groups use an earlier one: %s", step, damage)
        for name, group in groups.items():
            self.devices.make_room(group.load_checkpoint)
            group.load_checkpoint(paths[name])
        self.recover()
        return replace(save.state, in_flight=batches)

    def finish_if_written(self) -> None:
        """Finish the save in flight, if there is one and all groups have written it."""
        if self._writing is not None and self._writing.is_written():
            self.finish()

    def finish(self, timeout: float | None = None) -> None:
        """Wait until the groups have written the save in flight, record it, and delete what is obsolete.

        Args:
            timeout: seconds after which a group that has not written it fails; None: the timeout of the group.

        Raises:
            DataError: a group did not write its checkpoint, or the record cannot be written. What was written is
                deleted, and the earlier checkpoints stay.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        with self._deleted_if_it_fails(writing.staged, writing.state.global_steps):
            for group_name, group in writing.groups.items():
                group.wait_for_checkpoint.options(timeout=timeout)()
                if not writing.written[group_name].exists():
                    path = str(writing.written[group_name])
                    raise DataError(f"{group_name} reported a checkpoint at {path}, which does not exist", path=path)
            record = self._publish(writing)
        self._complete(record)
        self.saved_step = writing.state.global_steps
        self.longest = max(self.longest, time.monotonic() - self._began)

    def abandon(self, broken: Collection[str]) -> None:
        """Finish the save in flight, or give it up if one of its groups broke before it had written its part.

        Args:
            broken: names of the groups that are broken.
        """
        writing = self._writing
        if writing is None:
            return
        for name, group in writing.groups.items():
            if name not in broken:
                group.wait_for_checkpoint()
        if not {*broken} & writing.groups.keys():
            self.finish()
            return
        self._writing = None
        self._delete(writing.staged)

    def close(self) -> None:
        """Finish the save in flight, if its groups can still write it, and let other runs use the directory.

        Raises:
            DataError: see ``finish``.
        """
        try:
            with contextlib.suppress(GroupBroken):  # the error that broke it was raised
                self.finish(CLOSE_TIMEOUT_S)
        finally:
            release_lock(self.directory / LOCK)

    def _lock(self) -> None:
        try:
            acquire_lock(self.directory / LOCK, f"the directory of checkpoints {self.directory}")
        except OSError as error:
            text = f"cannot write to {self.directory}: {error}; {free_space(self.directory)}"
            raise DataError(text, path=str(self.directory)) from error

    def _delete(self, staged: str) -> None:
        """Delete the directories of this name in which groups wrote saves that do not count."""
        for directory in self.directory.glob(f"*/{staged}"):
            shutil.rmtree(directory, ignore_errors=True)

    @contextlib.contextmanager
    def _deleted_if_it_fails(self, staged: str, step: int) -> Iterator[None]:
        """Delete what was written of a save that fails. If it cannot be written, say what the run has instead."""
        try:
            yield
        except (MControllerError, OSError) as error:
            cause = error.cause if isinstance(error, WorkerError) else f"{error}; {free_space(self.directory)}"
            self._delete(staged)
            if not isinstance(error, OSError | WorkerError):
                raise
            record = self._record()
            has = "no checkpoint" if record is None else f"the checkpoint of step {record.last.state.global_steps}"
            text = f"the checkpoint of step {step} was not saved, and the run has {has}: {cause}"
            raise DataError(text, path=str(self.directory)) from error

    def _record(self) -> RunRecord | None:
        """Return the record; None if there is none, or it is damaged and the run starts a new one."""
        try:
            return read_record(self.directory)
        except DataError as error:
            if (self.directory / RECORD).exists():
                _logger.warning("%s; it is replaced", error)
            return None

    def _publish(self, writing: _Writing) -> RunRecord:
        """Replace the record: from now on the run has the new checkpoints."""
        state, before, damaged = writing.state, self._record(), self.damaged
        places = {name: str(Path(name) / path.name) for name, path in writing.written.items()}
        saves = () if before is None else before.saves()
        earlier = tuple(
            save for save in saves if save.state.global_steps < state.global_steps or save.state.global_steps in damaged
        )
        value = state.value if state.value is not None and math.isfinite(state.value) else None
        whole = tuple(save for save in earlier if save.state.global_steps not in damaged)
        kept = self._kept(whole, value)
        needed = {*places.values(), *(place for save in kept for place in save.groups.values())}
        record = RunRecord(
            last=SavedStep(
                places, replace(state, program=checked_program(state.program), value=value), writing.in_flight
            ),
            earlier=kept,
            staged=writing.staged,
            obsolete=tuple(
                place for save in earlier if save not in kept for place in save.groups.values() if place not in needed
            ),
        )
        write_record(self.directory, record)
        self.damaged = {}
        return record

    def _kept(self, earlier: tuple[SavedStep, ...], value: float | None) -> tuple[SavedStep, ...]:
        """Return the earlier saves to keep beside a new one, the newest first: the newest, and those of best value.

        Args:
            earlier: the saves before the new one, the newest first; only those of one metric are compared.
            value: of the new save, which counts among the best.
        """
        newest, sign = self._options.max_to_keep, 1.0 if self._options.best_mode == "min" else -1.0
        if newest is None:
            return earlier
        same = [save for save in earlier if save.state.best_metric == self._options.best_metric]
        compared: list[tuple[float, SavedStep | None]] = [] if value is None else [(sign * value, None)]
        compared += [(sign * save.state.value, save) for save in same if save.state.value is not None]
        best = [save for _, save in sorted(compared, key=lambda pair: pair[0])[: self._options.keep_best]]
        return tuple(save for at, save in enumerate(earlier) if at < newest - 1 or save in best)

    def _complete(self, record: RunRecord) -> None:
        """Move the checkpoints of the record to their places and delete what is obsolete; safe to repeat."""
        if record.staged:
            for place in map(self.directory.joinpath, record.last.groups.values()):
                _move(place.with_name(record.staged), place)
        for obsolete in record.obsolete:
            delete_obsolete(self.directory / obsolete)
        write_record(self.directory, replace(record, staged="", obsolete=()))


def _move(staged: Path, place: Path) -> None:
    """Move the checkpoint, then the links and files next to it by name, and delete the directory that they were in."""
    if not staged.exists():
        return
    if (staged / place.name).exists():
        if place.exists():
            place.rename(staged / ".replaced")
        (staged / place.name).rename(place)
    for file in sorted(staged.iterdir()):
        if (file.is_symlink() or file.is_file()) and not file.name.startswith("."):
            os.replace(file, place.with_name(file.name))
    sync_directory(place.parent)
    shutil.rmtree(staged)


def copy_oldest_save(source: Path, target: Path) -> None:
    """Copy the oldest save of a run, as the only one, into another directory of checkpoints.

    Raises:
        DataError: there is no save.
    """
    record = read_record(source)
    oldest = record.saves()[-1]
    for group, place in oldest.groups.items():
        shutil.copytree(record.locate(source, oldest, group), target / place, dirs_exist_ok=True)
    write_record(target, RunRecord(oldest))


class WholeSave(NamedTuple):
    """A save that can be loaded.

    Attributes:
        save: the record of it.
        paths: the checkpoint of each group.
        batches: the batches whose responses were generated and not yet trained on.
        damaged: by step, the damage of later saves.
    """

    save: SavedStep
    paths: Mapping[str, str]
    batches: tuple[BatchInFlight, ...]
    damaged: dict[int, str]


def newest_whole_save(
    directory: Path, record: RunRecord, groups: Mapping[str, WorkerGroup], *, with_batches: bool = True
) -> WholeSave:
    """Return the newest save whose checkpoints are whole, as far as its groups can verify them.

    Args:
        directory: of the run's checkpoints.
        record: of the run.
        groups: the groups to load, by name.
        with_batches: whether the batches in flight must be whole too.

    Raises:
        DataError: there is none; ``damaged`` has the damage of each by its step.
    """
    damaged: dict[int, str] = {}
    for save in record.saves():
        try:
            paths = {name: str(record.locate(directory, save, name)) for name in groups if name in save.groups}
            _verify(groups, paths)
            batches: tuple[BatchInFlight, ...] = ()
            if with_batches and save.in_flight:
                batches = read_batches(record.locate(directory, save, _IN_FLIGHT), save.in_flight)
        except DataError as error:
            damaged[save.state.global_steps] = str(error)
        else:
            return WholeSave(save, paths, batches, damaged)
    problems = "; ".join(f"step {step}: {damage}" for step, damage in damaged.items())
    raise DataError(f"no checkpoint in {directory} is whole: {problems}", path=str(directory), damaged=damaged)


def _verify(groups: Mapping[str, WorkerGroup], paths: Mapping[str, str]) -> None:
    """Raise DataError for the first damage that a group finds in its checkpoint."""
    for name, group in groups.items():
        if name not in paths:
            raise DataError(f"{name}: it has no checkpoint of this group", role=name)
        if not os.path.exists(paths[name]):
            raise DataError(f"{name}: {paths[name]} does not exist", role=name, path=paths[name])
        for damage in group.verify_checkpoint(paths[name]):
            if damage:
                raise DataError(f"{name}: {damage}", role=name, path=paths[name])
