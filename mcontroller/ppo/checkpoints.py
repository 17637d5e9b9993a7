"""A run's checkpoints: those of its groups, and the file that says which of them belong together."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcontroller.errors import DataError
from mcontroller.group import WorkerGroup

__all__ = ["RunState", "find_run", "load_run", "save_run"]

STATE = "trainer.json"


@dataclass(frozen=True)
class RunState:
    """What the controller itself must know to go on."""

    global_steps: int
    kl_coef: float


def save_run(directory: str, groups: Mapping[str, WorkerGroup], state: RunState, max_to_keep: int | None) -> None:
    """Has every group write its checkpoint under ``<directory>/<group>``; then ``trainer.json`` names them all.

    The file is replaced at once and last: until then the checkpoints before are the run's.
    """
    written = {
        name: group.save_checkpoint(str(Path(directory) / name), state.global_steps, max_to_keep)[0]
        for name, group in groups.items()
    }
    record = {
        "global_steps": state.global_steps,
        "kl_coef": state.kl_coef,
        "groups": {name: os.path.relpath(path, directory) for name, path in written.items()},
    }
    partial = Path(directory) / f".{STATE}.partial"
    partial.write_text(json.dumps(record, indent=1))
    os.replace(partial, partial.with_name(STATE))


def find_run(directory: str) -> dict[str, Any]:
    """What ``trainer.json`` says. Raises DataError where there is no such file."""
    path = Path(directory) / STATE
    if not path.is_file():
        raise DataError(f"there is no checkpoint to go on from: {path} does not exist", path=str(path))
    return json.loads(path.read_text())


def load_run(directory: str, groups: Mapping[str, WorkerGroup]) -> RunState:
    """Has every group go on from the checkpoint that ``trainer.json`` names.

    Raises DataError where there is no such file, or it names other groups than these.
    """
    record = find_run(directory)
    if set(record["groups"]) != set(groups):
        raise DataError(
            f"the checkpoint in {directory} is of a run with groups {sorted(record['groups'])}; this one has "
            f"{sorted(groups)}",
            saved=sorted(record["groups"]),
            groups=sorted(groups),
        )
    for name, group in groups.items():
        group.load_checkpoint(os.path.join(directory, record["groups"][name]))
    return RunState(record["global_steps"], record["kl_coef"])
