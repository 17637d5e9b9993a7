"""Where metrics go: a file of JSON lines, TensorBoard, the log, and services that are installed as extras."""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

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
    """What a tracker may want to know of a run. ``config`` is what the run is configured with, as plain data."""

    directory: Path
    project: str = "mcontroller"
    name: str = "run"
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Tracker(Protocol):
    """Takes numbers, each under a name such as ``train/score``, at a step of their own phase."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class JsonlTracker:
    """``metrics.jsonl``: one line a call, ``{"step": 3, "train/score": 0.5, ...}``, written at once."""

    def __init__(self, run: Run) -> None:
        self._file = (run.directory / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoardTracker:
    """TensorBoard events under ``tensorboard/``. Needs the extra ``tensorboard``."""

    def __init__(self, run: Run) -> None:
        _installed("tensorboard", "tensorboard")
        writer = _installed("torch.utils.tensorboard", "tensorboard")
        self._writer = writer.SummaryWriter(str(run.directory / "tensorboard"))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class ConsoleTracker:
    """One line of the log a call, at level INFO."""

    def __init__(self, run: Run) -> None:
        self._name = run.name

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = " ".join(f"{name}={value:.4g}" for name, value in metrics.items())
        logger.info("%s step %d: %s", self._name, step, values)

    def close(self) -> None:
        """There is nothing to end."""


class WandbTracker:
    """Weights & Biases. Needs the extra ``wandb``."""

    def __init__(self, run: Run) -> None:
        wandb = _installed("wandb", "wandb")
        self._run = wandb.init(project=run.project, name=run.name, dir=str(run.directory), config=dict(run.config))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """MLflow, at the tracking address that it is configured with. Needs the extra ``mlflow``."""

    def __init__(self, run: Run) -> None:
        self._mlflow = _installed("mlflow", "mlflow")
        self._mlflow.set_experiment(run.project)
        self._mlflow.start_run(run_name=run.name)
        self._mlflow.log_params(_flat(run.config))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


TRACKERS: dict[str, Callable[[Run], Tracker]] = {
    "jsonl": JsonlTracker,
    "tensorboard": TensorBoardTracker,
    "console": ConsoleTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}
"""Trackers by the name that a configuration gives them; add one's own."""


def make_trackers(names: Iterable[str], run: Run) -> Sequence[Tracker]:
    """The trackers of these names; makes the run's directory.

    Raises ConfigError for a name that does not exist, before any tracker is made, and for one that is not installed.
    """
    wanted = list(names)
    for name in wanted:
        if name not in TRACKERS:
            raise ConfigError(
                f"tracker {name!r} does not exist: it is one of {', '.join(TRACKERS)}", key="trackers", value=name
            )
    run.directory.mkdir(parents=True, exist_ok=True)
    return [TRACKERS[name](run) for name in wanted]


def _installed(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"tracker {extra!r} needs the module {missing.name!r}: pip install 'mcontroller[{extra}]'",
            key="trackers",
            value=extra,
        ) from missing


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, under dotted names."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
