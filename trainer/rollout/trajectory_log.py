"""The record of an asynchronous run: what the trainer took, a file for each time, in the order in which it took it.

A run that resumes takes the same again, as far as it was recorded after its checkpoint; a replay takes nothing else.
Both train on the same tokens, log-probabilities and versions, and so they get the same weights, whatever engine
generated them.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import zipfile
import zlib
from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcontroller.errors import DataError
from trainer.rollout.made_tokens import FAILURE_KINDS
from trainer.rollout.trajectory import ARRAYS, Trajectory

TRAJECTORIES = "trajectories"
"""The directory of the record, in that of the checkpoints."""
ENDS = ("", "stop", "turn", "length", "environment", *FAILURE_KINDS, "max_tokens")
_DAMAGES = (ValueError, LookupError, TypeError, OSError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile)

_logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Taken:
    """The groups of responses that the trainer took at one time.

    Attributes:
        groups: their numbers, in the order of the rows.
        prompts: the CRC-32 of the prompt of each group's problem.
        responses: those of all groups, equally many of each. The prompt is empty if it is that of the problem.
        version: of the policy that the trainer took them to train.
        fingerprint: of the weights of that policy; None if they were not compared with those of the rollout.
        dropped: the groups that began again since the time before, for being too old.
        dropped_tokens: their tokens, which were thrown away.
        log_probs: the name of the column of log-probabilities; None: there is none.
        basis: what these were computed from, as ``meta_info`` of a batch.
        settings: the configuration of what is learned, a value for each key.
    """

    groups: list[int]
    prompts: list[int]
    responses: list[Trajectory]
    version: int
    fingerprint: int | None = None
    dropped: list[int] = dataclasses.field(default_factory=list)
    dropped_tokens: int = 0
    log_probs: str | None = None
    basis: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class TrajectoryLog:
    """The files of a run: ``append`` writes the next one, ``next`` reads it if it was written before.

    Args:
        directory: of the checkpoints.
        resumes: whether an earlier process of the run has written files; otherwise they are deleted.
        replay: the directory of another run, whose files are read instead.

    Attributes:
        count: how often the trainer has taken groups.
        replays: whether the files are those of another run.

    Raises:
        DataError: the other run has no files.
    """

    def __init__(self, directory: Path, *, resumes: bool = False, replay: Path | None = None) -> None:
        self.replays = replay is not None
        self.directory = directory / TRAJECTORIES if replay is None else _log_in(replay)
        self.count, self._resumes = 0, resumes or self.replays

    def has_next(self) -> bool:
        """Whether what the trainer takes next was recorded."""
        if not self._resumes:
            self._delete(self.files())
            self._resumes = True
        return self._path(self.count).exists()

    def next(self, ahead: int = 0) -> Taken | None:
        """Return what the trainer takes next, or ``ahead`` times later, if it was recorded.

        Raises:
            DataError: the file is damaged, or the run replays another one, which did not go as far.
        """
        path = self._path(self.count + ahead)
        if self.has_next() and path.exists():
            return read(path)
        if self.replays and not ahead:
            numbers = [int(file.stem) for file in self.files()]
            known = f"has files {min(numbers)} to {max(numbers)}" if numbers else "has no files"
            raise DataError(
                f"the replay needs file {self.count} of {self.directory}, which {known}: set "
                "trainer.total_training_steps to the steps of the recorded run; earlier files are deleted with the "
                "checkpoints that need them (trainer.max_to_keep=null keeps all)",
                path=str(path),
                record=self.count,
            )
        return None

    def append(self, taken: Taken) -> None:
        """Record what the trainer takes now."""
        self.has_next()
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self._path(self.count)
        write(path, taken)
        self.count += 1

    def leave(self, error: DataError) -> None:
        """Forget what was recorded from here on: it does not fit this run.

        Args:
            error: how it differs.

        Raises:
            DataError: ``error``, if the run replays another one.
        """
        if self.replays:
            raise error
        _logger.warning("what the run has recorded after its checkpoint is generated again: %s", error)
        self._delete([file for file in self.files() if int(file.stem) >= self.count])

    def restore(self, count: int) -> None:
        """Go back to the time at which the trainer had taken groups ``count`` times."""
        self.count, self._resumes = count, True

    def delete_before(self, count: int) -> None:
        """Delete the files that a run which resumes with ``count`` or more does not read."""
        if not self.replays:
            self._delete([file for file in self.files() if int(file.stem) < count])

    def files(self) -> list[Path]:
        """Return the files, in their order."""
        return sorted(self.directory.glob("[0-9]*.npz"))

    def _path(self, number: int) -> Path:
        return self.directory / f"{number:08d}.npz"

    @staticmethod
    def _delete(files: Sequence[Path]) -> None:
        for file in files:
            file.unlink()


def _log_in(directory: Path) -> Path:
    """Return the record in the directory of a run, or of its checkpoints."""
    logs = sorted({*directory.glob(TRAJECTORIES), *directory.glob(f"*/{TRAJECTORIES}")})
    if len(logs) != 1:
        raise DataError(
            f"{directory} has {len(logs)} directories {TRAJECTORIES}, expected one: pass the directory of a run with "
            "trainer.max_staleness of 2 or more, or of 1 with responses of several turns",
            path=str(directory),
        )
    return logs[0]


def write(path: Path, taken: Taken) -> None:
    """Write a file of arrays, which has a checksum of each; it has its name when it is complete.

    A token has 8 bytes. Versions, marks and temperatures are written once for each run of tokens that share them.
    """
    made = taken.responses
    lengths = np.array([len(response.tokens) for response in made])
    columns = {name: _joined(made, name) for name in ARRAYS}
    starts = np.zeros(lengths.sum() + 1, bool)
    starts[np.cumsum(lengths) - lengths] = True
    for name in ("mask", "versions", "temperatures"):
        starts[1:-1] |= columns[name][1:] != columns[name][:-1]
    first = starts[:-1].nonzero()[0]
    experts = [torch.cat(response.experts).numpy() for response in made if response.experts]
    numbers = [
        (
            len(response.prompt),
            len(response.tokens),
            sum(map(len, response.experts)),
            response.turn,
            response.turns,
            ENDS.index(response.ended),
            response.seed or 0,
        )
        for response in made
    ]
    names = (field.name for field in dataclasses.fields(taken) if field.name != "responses")
    others = {name: getattr(taken, name) for name in names}
    if any(response.score is not None or response.metrics for response in made):
        others["outcomes"] = [(response.score, dict(response.metrics)) for response in made]
    arrays = {
        "others": np.frombuffer(zlib.compress(json.dumps(others).encode()), np.uint8),
        "rows": np.array(numbers, np.int64),
        "prompts": columns["prompt"].astype(np.int32),
        "tokens": columns["tokens"].astype(np.int32),
        "log_probs": columns["log_probs"].astype(np.float32),
        "run_starts": first.astype(np.int64),
        "run_versions": columns["versions"][first].astype(np.int32),
        "run_masks": columns["mask"][first],
        "run_temperatures": columns["temperatures"][first],
        **({"experts": np.concatenate(experts)} if experts else {}),
    }
    partial = path.with_suffix(".part")
    with open(partial, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    os.replace(partial, path)


def _joined(responses: Sequence[Trajectory], name: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(b"".join(getattr(response, name) for response in responses), np.dtype(ARRAYS[name]))


def read(path: Path) -> Taken:
    """Return the content of a file.

    Raises:
        DataError: it is damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        others = json.loads(zlib.decompress(arrays["others"].tobytes()))
        outcomes = others.pop("outcomes", ())
        taken = Taken(responses=_responses(arrays), **others)
        for response, outcome in zip(taken.responses, outcomes, strict=False):
            response.score, response.metrics = outcome
        return taken
    except _DAMAGES as error:
        raise DataError(
            f"{path} is damaged: {error}. Restore it; or, to resume, delete it and the files after it, so that their "
            "responses are generated again",
            path=str(path),
        ) from error


def _responses(arrays: Mapping[str, np.ndarray[Any, Any]]) -> list[Trajectory]:
    count = len(arrays["tokens"])
    lengths = np.diff(arrays["run_starts"], append=count)
    columns = {
        "prompt": arrays["prompts"].astype(np.int64),
        "tokens": arrays["tokens"].astype(np.int64),
        "log_probs": arrays["log_probs"].astype(np.float64),
        "mask": arrays["run_masks"].repeat(lengths),
        "versions": arrays["run_versions"].astype(np.int64).repeat(lengths),
        "temperatures": arrays["run_temperatures"].astype(np.float64).repeat(lengths),
    }
    rows = arrays["rows"].tolist()
    offsets = [[*accumulate((row[at] for row in rows), initial=0)] for at in range(3)]
    responses = []
    for (_, _, known, turn, turns, ended, seed), *spans in zip(rows, *map(pairwise, offsets), strict=True):
        parts = {
            name: array(ARRAYS[name], column[slice(*spans[name != "prompt"])].tobytes())
            for name, column in columns.items()
        }
        response = Trajectory(**parts, seed=seed or None, turn=turn, turns=turns, ended=ENDS[ended])  # type: ignore[arg-type]
        if known:
            response.experts = [torch.from_numpy(arrays["experts"][slice(*spans[2])])]
        responses.append(response)
    return responses
