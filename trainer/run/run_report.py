"""What a run says of itself: what started it, where it resumes, what is saved when it ends early, and its summary."""

from __future__ import annotations

import json
import logging
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mcontroller.config.fields import changed_fields
from mcontroller.errors import DataError
from mcontroller.files import replace_text
from mcontroller.trace.reading import read_trace
from mcontroller.trace.recorder import FOLDER
from mcontroller.trace.summary import summary_lines
from trainer.loop import RayPPOTrainer
from trainer.report.curves import draw_curves
from trainer.report.reading import last_step, read_summary
from trainer.run.config import RunConfig
from trainer.saving.run_record import RECORD, read_record

_logger = logging.getLogger(__name__)
SUMMARY = "summary.json"
PACKAGES = ("mcontroller", "torch", "megatron-core", "ray")
READ_AT_END = 64
"""Files of a trace up to which it is read at the end of a run, which takes up to a second for each."""
LEAST_SHARE = 0.005
"""Share of the time from which the table of stages has a row for ``overlapped``, which is negative."""


class RunReport:
    """The report of the process that runs or resumes a run.

    Construct it before the tracker of ``metrics.jsonl``, which removes the steps after the last save.

    Args:
        directory: the run's directory.
        config: the configuration of the run.
        console: where lines and tables are printed.
    """

    def __init__(self, directory: Path, config: RunConfig, console: Console) -> None:
        self._directory, self._trainer, self._console = directory, config.trainer, console
        self._began, self._done = time.perf_counter(), last_step(directory / "metrics.jsonl")
        self._process: dict[str, Any] = {
            "command": shlex.join([Path(sys.argv[0]).name.replace("__main__.py", "mcontroller"), *sys.argv[1:]]),
            "commit": _commit(),
            "versions": _versions(),
            "host": socket.gethostname(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "changes": changed_fields(config),
        }

    def begin(self) -> None:
        """Print what started the run, and where it resumes; record the process in ``summary.json``."""
        process = self._process
        versions = ", ".join(f"{name} {number}" for name, number in process["versions"].items())
        commit = f", commit {process['commit']}" if process["commit"] else ""
        self._print(f"{process['command']}  on {process['host']}{commit}, {versions}")
        if self._trainer.resume:
            record = Path(self._trainer.default_local_dir) / RECORD
            minutes = (time.time() - record.stat().st_mtime) / 60
            step, total = read_record(record.parent).last.state.global_steps, self._trainer.total_training_steps
            lost = f"; {self._done - step} later steps are lost" if self._done > step else ""
            self._print(f"resuming from step {step} of {total}, saved {minutes:.0f} min ago{lost}")
        before = self._before()
        self._write({**before, "processes": [*before.get("processes", []), process]})

    def end_early(self, steps: int) -> None:
        """Print what is saved, what is lost, and the command that continues.

        Args:
            steps: steps of PPO that this process had done.
        """
        checkpoints = Path(self._trainer.default_local_dir)
        if not (checkpoints / RECORD).is_file():
            again = f", {steps} are lost; begin again with: python -m mcontroller resume {self._directory}"
            self._print("no step is saved" + (again if steps else ""))
            return
        try:
            saved = read_record(checkpoints).last.state.global_steps
        except DataError as error:
            self._print(str(error))
            return
        lost = max(steps - saved, 0)
        self._print(
            f"step {saved} of {self._trainer.total_training_steps} is saved, {lost} later steps are lost; continue "
            f"with: python -m mcontroller resume {self._directory}"
        )

    def end(self, trainer: RayPPOTrainer) -> None:
        """Write ``summary.json`` of all processes of the run, and print the seconds of every stage of this one."""
        wall, stages, before = time.perf_counter() - self._began, trainer.stages.totals, self._before()
        earlier = before.get("stages_s", {})
        self._process["wall_s"] = wall
        self._write(
            {
                "wall_s": before.get("wall_s", 0.0) + wall,
                "stages_s": {name: earlier.get(name, 0.0) + stages.get(name, 0.0) for name in {**earlier, **stages}},
                "global_step": trainer.global_steps,
                "saved_step": trainer.checkpoints.saved_step,
                "restarts": before.get("restarts", 0) + len(trainer.recovery.failures),
                "processes": [*before.get("processes", [])[:-1], self._process],
            }
        )
        table = Table("stage", "seconds", "share", title="Time by stage", title_justify="left")
        for name, seconds in rows_of(stages, wall):
            table.add_row(name, f"{seconds:.1f}", f"{seconds / wall:.0%}")
        self._console.print(table, markup=False, emoji=False)
        if line := trainer.step.generations.summary():
            self._print(line)
        if self._trainer.trace:
            self._print_trace()
        self._print(f"run directory: {self._directory}{self._curves()}")

    def _curves(self) -> str:
        """Draw the curves of the run, and return what its last line says of them."""
        if not (self._directory / "metrics.jsonl").is_file():
            return " (curves.png needs the tracker jsonl)"
        try:
            return f", with {draw_curves(self._directory).name}"
        except ImportError:
            return " (for curves.png: pip install matplotlib)"

    def _print_trace(self) -> None:
        if len(list((self._directory / FOLDER).iterdir())) > READ_AT_END:
            self._print(f"where the time went: python -m mcontroller trace {self._directory}")
            return
        try:
            lines = summary_lines(read_trace(self._directory))
        except DataError as error:  # the run itself has succeeded
            lines = [str(error)]
        for line in lines:
            self._print(line)

    def _before(self) -> dict[str, Any]:
        try:
            return read_summary(self._directory)
        except DataError as error:  # a report must not end the run
            _logger.warning("%s; it is replaced", error)
            return {}

    def _write(self, summary: Mapping[str, Any]) -> None:
        replace_text(self._directory / SUMMARY, json.dumps(summary, indent=1))

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)


def rows_of(stages: Mapping[str, float], wall: float) -> list[tuple[str, float]]:
    """Return the rows of the table of stages, the longest first; a negative one that would be shown as 0% is none."""
    shown = {name: seconds for name, seconds in stages.items() if seconds >= 0 or seconds < -LEAST_SHARE * wall}
    return [*sorted(shown.items(), key=lambda row: -row[1]), ("other", max(wall - sum(shown.values()), 0.0))]


def _commit() -> str | None:
    """Return the commit of the working tree that this process runs in, with ``+`` if it has changes; None without."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
