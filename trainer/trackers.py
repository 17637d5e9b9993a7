"""Trackers of metrics: JSON lines, TensorBoard, and services that are installed as extras."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

from mcontroller.config.imports import import_extra
from mcontroller.config.registry import Registry
from mcontroller.errors import DataError
from mcontroller.files import free_space, replace_text

TRAIN = "train"
"""The phase of the steps that are counted from 1 to the end of the run."""
Samples = Sequence[Mapping[str, Any]]
"""Rows of a table, as mappings of texts and numbers by column."""
TRACKERS: Registry[Callable[[Run], Tracker]] = Registry("tracker", key="trackers")
"""Trackers by the name that a configuration uses; ``TRACKERS.register`` adds one."""
METRICS_BYTES, SAMPLES_BYTES = 256_000_000, 16_000_000
"""Most bytes of the files of ``JsonlTracker``."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Facts about a run, for its trackers."""

    directory: Path
    """Directory of the run's files."""
    project: str = "mcontroller"
    """Name of the project that the run belongs to."""
    name: str = "run"
    """Name of the run."""
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Configuration of the run, as plain data."""
    resumed_at: int | None = None
    """Step of the checkpoint from which the run is resumed: trackers continue after it. None: a new run."""

    def remembered(self, name: str, new: Callable[[], str]) -> str:
        """Return the id of this run at a service: the one in the run's directory if it is resumed, else a new one."""
        path = self.directory / name
        if self.resumed_at is None or not path.is_file():
            path.write_text(new(), encoding="utf-8")
        return path.read_text(encoding="utf-8")


class Tracker(Protocol):
    """A destination of metrics."""

    def log(self, metrics: Mapping[str, float], step: int, phase: str = TRAIN) -> None:
        """Record metrics of a step.

        Args:
            metrics: by names such as ``train/score``.
            step: the number of the step in its phase.
            phase: ``"train"``, or ``"warm_up"``, whose steps are counted apart.
        """

    def log_samples(self, samples: Samples, step: int) -> None:
        """Record a table of samples of a step: all of them have the same columns, such as ``prompt`` and ``score``."""

    def close(self) -> None:
        """Flush and release resources."""


@runtime_checkable
class Rewinds(Protocol):
    """A tracker that can remove what a run repeats after a failure; others get the repeated steps twice."""

    def rewind(self, step: int) -> None:
        """Remove what was recorded of the steps after this one; -1: everything."""


def rewind(trackers: Iterable[Tracker], step: int) -> None:
    """Let all trackers that can remove what was recorded of the steps after this one; -1: everything."""
    for tracker in trackers:
        if isinstance(tracker, Rewinds):
            tracker.rewind(step)


class _StepLines:
    """A file with lines of steps. At ``most`` bytes, every second step is removed, and left out from then on."""

    def __init__(self, path: Path, most: int, resumed_at: int | None) -> None:
        self._path, self._most, self._every = path, most, 1
        self._resumed_at = resumed_at
        self._file: TextIO | None = None  # until the first line: a run that does not start leaves no file

    def rewind(self, step: int) -> None:
        """Remove the steps after this one."""
        self._resumed_at = None
        self.close()
        if self._path.is_file():
            _remove_later_steps(self._path, step)

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a line."""
        if self._resumed_at is not None:
            self.rewind(self._resumed_at)
        if step % self._every:
            return
        try:
            self._file = self._file or self._path.open("a", encoding="utf-8", buffering=1)
            self._file.write(json.dumps({"global_step": step, **values}, default=str) + "\n")
            if self._file.tell() > self._most:
                self._thin_out()
        except OSError as error:
            with contextlib.suppress(OSError):
                self.close()  # and what it has not written
            raise DataError(
                f"cannot write step {step} to {self._path}: {error.strerror}; {free_space(self._path)}: free some, "
                "and resume the run",
                path=str(self._path),
            ) from error

    def _thin_out(self) -> None:
        self._every *= 2
        self.close()
        lines = self._path.read_bytes().splitlines(keepends=True)
        kept = b"".join(line for line in lines if _step_of(line) % self._every == 0)
        replace_text(self._path, kept.decode(errors="replace"))

    def close(self) -> None:
        """Flush and close the file; the next line opens it again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


@TRACKERS.register("jsonl")
class JsonlTracker:
    """Tracker that appends a line to ``metrics.jsonl`` at every call.

    It is ``{"global_step": 3, "phase": "train", "time": 1767225600.0, "train/score": 0.5, ...}``, the time in seconds
    since 1970.

    In a resumed run, the steps after its checkpoint are removed with the first line: they are repeated. Files are
    bounded: at ``METRICS_BYTES``, which is about 70,000 steps, ``metrics.jsonl`` loses every second step, and goes on
    with every second one; ``samples.jsonl`` does at ``SAMPLES_BYTES``.
    """

    def __init__(self, run: Run) -> None:
        self._metrics = _StepLines(run.directory / "metrics.jsonl", METRICS_BYTES, run.resumed_at)
        self._samples = _StepLines(run.directory / "samples.jsonl", SAMPLES_BYTES, run.resumed_at)

    def rewind(self, step: int) -> None:
        """Remove the steps after this one."""
        for file in (self._metrics, self._samples):
            file.rewind(step)

    def log(self, metrics: Mapping[str, float], step: int, phase: str = TRAIN) -> None:
        """Record metrics of a step."""
        self._metrics.add(step, {"phase": phase, "time": time.time(), **metrics})

    def log_samples(self, samples: Samples, step: int) -> None:
        """Append a line for each sample to ``samples.jsonl``."""
        for sample in samples:
            self._samples.add(step, sample)

    def close(self) -> None:
        """Flush and release resources."""
        self._metrics.close()
        self._samples.close()


@TRACKERS.register("tensorboard")
class TensorBoardTracker:
    """Tracker that writes TensorBoard events under ``tensorboard/``. Needs the extra ``tensorboard``.

    A warm-up has a directory of its own, since its steps are counted apart and are not hidden with later ones.
    """

    def __init__(self, run: Run) -> None:
        import_extra("tensorboard", "tensorboard", "trackers")
        self._module = import_extra("torch.utils.tensorboard", "tensorboard", "trackers")
        self._directory, self._writers = run.directory / "tensorboard", dict[str, Any]()
        self._first = 0 if run.resumed_at is None else run.resumed_at + 1

    def _writer(self, phase: str) -> Any:
        if phase not in self._writers:
            directory = self._directory if phase == TRAIN else self._directory / phase
            self._writers[phase] = self._module.SummaryWriter(str(directory), purge_step=self._first)
        return self._writers[phase]

    def rewind(self, step: int) -> None:
        """Hide the steps after this one."""
        self.close()
        self._writers, self._first = {}, step + 1

    def log(self, metrics: Mapping[str, float], step: int, phase: str = TRAIN) -> None:
        """Record metrics of a step."""
        for name, value in metrics.items():
            self._writer(phase).add_scalar(name, value, step)
        self._writer(phase).flush()  # a run that is killed goes on from a later step

    def log_samples(self, samples: Samples, step: int) -> None:
        """Record a table as text."""
        columns, rows = _table(samples)
        lines = [columns, ["---"] * len(columns), *([str(cell) for cell in row] for row in rows)]
        cells = [[cell.replace("|", "\\|").replace("\n", "<br>") for cell in line] for line in lines]
        self._writer(TRAIN).add_text("samples", "\n".join(f"| {' | '.join(line)} |" for line in cells), step)

    def close(self) -> None:
        """Flush and release resources."""
        for writer in self._writers.values():
            writer.close()


@TRACKERS.register("wandb")
class WandbTracker:
    """Tracker of Weights & Biases. Needs the extra ``wandb``."""

    def __init__(self, run: Run) -> None:
        wandb = import_extra("wandb", "wandb", "trackers")
        self._wandb = wandb
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            dir=str(run.directory),
            config=dict(run.config),
            id=run.remembered("wandb_run_id", lambda: uuid.uuid4().hex[:8]),
            resume="allow",
        )

    def log(self, metrics: Mapping[str, float], step: int, phase: str = TRAIN) -> None:
        """Record metrics of a step."""
        self._run.log({**metrics, "global_step": step, "phase": phase})

    def log_samples(self, samples: Samples, step: int) -> None:
        """Record a table."""
        columns, rows = _table(samples)
        self._run.log({"samples": self._wandb.Table(columns=columns, data=rows), "global_step": step})

    def close(self) -> None:
        """Flush and release resources."""
        self._run.finish()


@TRACKERS.register("mlflow")
class MlflowTracker:
    """Tracker of MLflow, at MLflow's configured tracking URI. Needs the extra ``mlflow``."""

    _ID = "mlflow_run_id"

    def __init__(self, run: Run) -> None:
        self._mlflow = import_extra("mlflow", "mlflow", "trackers")
        self._mlflow.set_experiment(run.project)
        if run.resumed_at is not None and (run.directory / self._ID).is_file():
            self._mlflow.start_run(run_id=(run.directory / self._ID).read_text(encoding="utf-8"))
            return
        started = self._mlflow.start_run(run_name=run.name)
        run.remembered(self._ID, lambda: str(started.info.run_id))
        self._mlflow.log_params(dict(leaves(run.config)))

    def log(self, metrics: Mapping[str, float], step: int, phase: str = TRAIN) -> None:
        """Record metrics of a step."""
        self._mlflow.log_metrics(dict(metrics), step=step)

    def log_samples(self, samples: Samples, step: int) -> None:
        """Record a table as ``samples/step_<step>.json``."""
        columns, rows = _table(samples)
        data = {name: [row[index] for row in rows] for index, name in enumerate(columns)}
        self._mlflow.log_table(data, f"samples/step_{step}.json")

    def close(self) -> None:
        """Flush and release resources."""
        self._mlflow.end_run()


def make_trackers(names: Iterable[str], run: Run) -> Sequence[Tracker]:
    """Create the trackers of these names, and the run's directory for them.

    Raises:
        ConfigError: no tracker has this name (before any is created), or its package is not installed.
    """
    chosen = [TRACKERS.get_or_raise(name) for name in names]
    if chosen:
        run.directory.mkdir(parents=True, exist_ok=True)
    return [tracker(run) for tracker in chosen]


def _table(samples: Samples) -> tuple[list[str], list[list[Any]]]:
    """Return the names of the columns, and the rows."""
    columns = list(samples[0])
    return columns, [[sample.get(name) for name in columns] for sample in samples]


def _remove_later_steps(path: Path, step: int) -> None:
    """Remove the lines at the end of a file of metrics whose step is later; the lines of a warm-up come first."""
    lines = path.read_bytes().splitlines(keepends=True)
    removed = 0
    while lines and _step_of(lines[-1]) > step:
        removed += len(lines.pop())
    if removed:
        os.truncate(path, path.stat().st_size - removed)


def _step_of(line: bytes) -> float:
    """Return the step of a line; infinity for one that a killed run left incomplete, or that is damaged."""
    try:
        return int(json.loads(line)["global_step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings with their dotted names; an empty mapping is a value."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
