"""Checkpoints of a run: one for each group, and a file that records which of them belong together."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcontroller.errors import DataError
from mcontroller.group import WorkerGroup
from mcontroller.ppo.devices import SharedDevices

__all__ = ["RunState", "find_run", "load_run", "save_run"]

STATE = "trainer.json"


@dataclass(frozen=True)
class RunState:
    """The controller's own state.

    Attributes:
        global_steps: steps of PPO done.
        kl_coef: weight of the KL penalty.
    """

    global_steps: int
    kl_coef: float


def save_run(
    directory: str, groups: Mapping[str, WorkerGroup], state: RunState, max_to_keep: int | None, devices: SharedDevices
) -> None:
    """Save every group's checkpoint under ``<directory>/<group>``, then replace ``trainer.json``, which names them.

    The file is replaced last and atomically: until then, the earlier checkpoints are those of the run.

    Args:
        directory: the directory of the run's checkpoints.
        groups: the groups to save, by name.
        state: the controller's own state.
        max_to_keep: number of checkpoints to keep; None for all.
        devices: the devices that the groups share.
    """
    written: dict[str, str] = {}
    for name, group in groups.items():
        devices.make_room(group.save_checkpoint)
        written[name] = group.save_checkpoint(str(Path(directory) / name), state.global_steps, max_to_keep)[0]
    record = {
        "global_steps": state.global_steps,
        "kl_coef": state.kl_coef,
        "groups": {name: os.path.relpath(path, directory) for name, path in written.items()},
    }
    partial = Path(directory) / f".{STATE}.partial"
    partial.write_text(json.dumps(record, indent=1))
    os.replace(partial, partial.with_name(STATE))


def find_run(directory: str) -> dict[str, Any]:
    """Return the content of ``trainer.json``.

    Raises:
        DataError: the file does not exist.
    """
    path = Path(directory) / STATE
    if not path.is_file():
        raise DataError(f"there is no checkpoint to resume from: {path} does not exist", path=str(path))
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def load_run(directory: str, groups: Mapping[str, WorkerGroup], devices: SharedDevices) -> RunState:
    """Load every group's checkpoint that ``trainer.json`` names, and return the controller's own state.

    Args:
        directory: as for ``save_run``.
        groups: the groups to load, by name.
        devices: the devices that the groups share.

    Raises:
        DataError: the file does not exist, or names other groups.
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
        devices.make_room(group.load_checkpoint)
        group.load_checkpoint(os.path.join(directory, record["groups"][name]))
    return RunState(record["global_steps"], record["kl_coef"])
