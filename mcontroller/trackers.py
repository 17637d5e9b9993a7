"""Trackers of metrics: JSON lines, TensorBoard, the log, and services that are installed as extras."""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from mcontroller.config.registry import Registry
from mcontroller.errors import ConfigError

__all__ = [
    "TRACKERS",
    "ConsoleTracker",
    "JsonlTracker",
    "MlflowTracker",
    "Run",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
    "make_trackers",
]

logger = logging.getLogger(__name__)


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


class Tracker(Protocol):
    """A destination of metrics."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of a step, by names such as ``train/score``."""

    def close(self) -> None:
        """Flush and release resources."""


TRACKERS: Registry[Callable[[Run], Tracker]] = Registry("tracker", key="trackers")
"""Trackers by the name that a configuration uses; ``TRACKERS.register`` adds one."""


@TRACKERS.register("jsonl")
class JsonlTracker:
    """Tracker that appends a line ``{"step": 3, "train/score": 0.5, ...}`` to ``metrics.jsonl`` at every call."""

    def __init__(self, run: Run) -> None:
        self._file = (run.directory / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of a step."""
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")

    def close(self) -> None:
        """Flush and release resources."""
        self._file.close()


@TRACKERS.register("tensorboard")
class TensorBoardTracker:
    """Tracker that writes TensorBoard events under ``tensorboard/``. Needs the extra ``tensorboard``."""

    def __init__(self, run: Run) -> None:
        _import_extra("tensorboard", "tensorboard")
        writer = _import_extra("torch.utils.tensorboard", "tensorboard")
        self._writer = writer.SummaryWriter(str(run.directory / "tensorboard"))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of a step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and release resources."""
        self._writer.close()


@TRACKERS.register("console")
class ConsoleTracker:
    """Tracker that logs a line at level INFO at every call."""

    def __init__(self, run: Run) -> None:
        self._name = run.name

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of a step."""
        values = " ".join(f"{name}={value:.4g}" for name, value in metrics.items())
        logger.info("%s step %d: %s", self._name, step, values)

    def close(self) -> None:
        """Do nothing."""


@TRACKERS.register("wandb")
class WandbTracker:
    """Tracker of Weights & Biases. Needs the extra ``wandb``."""

    def __init__(self, run: Run) -> None:
        wandb = _import_extra("wandb", "wandb")
        self._run = wandb.init(project=run.project, name=run.name, dir=str(run.directory), config=dict(run.config))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of a step."""
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        """Flush and release resources."""
        self._run.finish()


@TRACKERS.register("mlflow")
class MlflowTracker:
    """Tracker of MLflow, at MLflow's configured tracking URI. Needs the extra ``mlflow``."""

    def __init__(self, run: Run) -> None:
        self._mlflow = _import_extra("mlflow", "mlflow")
        self._mlflow.set_experiment(run.project)
        self._mlflow.start_run(run_name=run.name)
        self._mlflow.log_params(_flat(run.config))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of a step."""
        self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        """Flush and release resources."""
        self._mlflow.end_run()


def make_trackers(names: Iterable[str], run: Run) -> Sequence[Tracker]:
    """Create the trackers of these names, and the run's directory.

    Raises:
        ConfigError: no tracker has this name (before any is created), or its package is not installed.
    """
    chosen = [TRACKERS.get_or_raise(name) for name in names]
    run.directory.mkdir(parents=True, exist_ok=True)
    return [tracker(run) for tracker in chosen]


def _import_extra(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"tracker {extra!r} needs the module {missing.name!r}: pip install 'mcontroller[{extra}]'",
            key="trackers",
            value=extra,
        ) from missing


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one with dotted names."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
