"""What people see of a run: the events that the trainer reports, and how they are shown."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO, cast

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from mcontroller.group import WorkerGroup
from mcontroller.output import Output, printable
from parallel_state.axes import RANK_AXIS
from parallel_state.topology import Topology

WIDE = 100
"""Width in characters from which the bar shows the elapsed time too."""
LINES_PER_PHASE = 8
"""Lines that replace the bar if the output is not a terminal."""
SHOWN_SAMPLES = 2
SHOWN_CHARACTERS = 100
"""Longest part of a text that a line of a sample shows: its end."""
SHOWN: Mapping[str, tuple[str, str]] = {
    "sft/loss": ("loss", ".3f"),
    "train/score": ("reward", ".3f"),
    "train/accuracy": ("accuracy", ".3f"),
    "actor/reward_kl_penalty": ("KL", ".4f"),
    "actor/kl_loss": ("KL loss", ".4f"),
    "perf/tokens_per_s": ("tokens/s", ",.0f"),
}
"""Metrics that the bar shows if a step has them: label and format."""


class Display:
    """Override the methods of the events to show; the trainer calls them in its own thread.

    The first failure of a display is logged; nothing more is shown then, and the run goes on.
    """

    def starting(self, what: str) -> None:
        """Show the start of an operation that takes seconds, described by ``what``."""

    def groups(self, groups: Mapping[str, WorkerGroup]) -> None:
        """Show all groups, by name, after they have started."""

    def phase(self, name: str, steps: int, done: int = 0) -> None:
        """Show the start of a phase of ``steps`` steps, of which an earlier run has done ``done``."""

    def step(self, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished step of the phase."""

    def samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Show samples of a finished step, each with its ``prompt``, ``response`` and ``score``."""

    def held_out(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of the held-out problems after ``step`` steps of PPO."""

    def close(self) -> None:
        """End the display; called once, also after an error."""


class ProgressDisplay(Display):
    """Tables and a progress bar on ``console``, by default standard output.

    If it is not a terminal, a few lines per phase replace the bar.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(file=cast(TextIO, Output(sys.stdout)))
        columns = (
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}", markup=False, table_column=Column(no_wrap=True)),
        )
        timed = (*columns, TimeElapsedColumn()) if self.console.width >= WIDE else columns
        self._progress = Progress(*timed, console=self.console, disable=not self.console.is_terminal)
        self._task: TaskID | None = None

    def starting(self, what: str) -> None:
        """Print the operation that starts."""
        self._print(Text(f"{printable(what)} ...", style="dim"))

    def groups(self, groups: Mapping[str, WorkerGroup]) -> None:
        """Print the table of groups."""
        self._print(group_table(groups))

    def phase(self, name: str, steps: int, done: int = 0) -> None:
        """Start a new progress bar."""
        self._progress.start()
        if self._task is not None:
            self._progress.stop_task(self._task)
        self._task = self._progress.add_task(name, total=steps, completed=done, shown="")

    def step(self, metrics: Mapping[str, float]) -> None:
        """Advance the bar; without a terminal, print a line at every eighth of the phase."""
        if self._task is None:
            return
        self._progress.update(self._task, advance=1, shown=metrics_text(metrics))
        task = self._progress.tasks[self._task]
        if self._progress.disable and self._has_lines(task.completed):
            line = f"{task.description} {task.completed:.0f}/{task.total:.0f}  {metrics_text(metrics)}"
            self._print(line)

    def _has_lines(self, step: float) -> bool:
        """Return whether lines are printed for a step of the phase: every eighth of them, and the last."""
        if self._task is None:
            return True
        total = int(self._progress.tasks[self._task].total or 0)
        return step % max(1, math.ceil(total / LINES_PER_PHASE)) == 0 or step >= total

    def samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Print the first samples of a step, at every eighth of the phase."""
        if self._task is not None and not self._has_lines(self._progress.tasks[self._task].completed + 1):
            return
        for sample in samples[:SHOWN_SAMPLES]:
            texts = " -> ".join(_shortened(sample[name]) for name in ("prompt", "response"))
            score = "no score" if sample.get("score") is None else f"{sample['score']:.3g}"
            self._print(f"  {texts}  ({score})", soft_wrap=True)

    def held_out(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the means of the held-out problems; that of a reward function alone is the score."""
        shown = {name: value for name, value in without_zeros(metrics).items() if name.startswith("held_out/")}
        scores = {name.rpartition("/")[0]: value for name, value in shown.items() if name.endswith("/score")}
        values = ", ".join(
            f"{name.removeprefix('held_out/')} {value:.3f}"
            for name, value in shown.items()
            if not name.endswith(("_std", "_min", "_max"))
            and (
                name.endswith("/score")
                or not math.isclose(value, scores.get(name.rpartition("/")[0], math.nan), rel_tol=1e-6)
            )
        )
        self._print(Text.assemble(f"held-out after {step} steps: ", (values, "bold")))

    def close(self) -> None:
        """Stop the bar."""
        self._progress.stop()

    def _print(self, shown: RenderableType, *, soft_wrap: bool = False) -> None:
        """Print texts as they are: names and messages of programs may look like markup."""
        self.console.print(shown, markup=False, emoji=False, highlight=False, soft_wrap=soft_wrap)


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Return the metrics of a step as the bar shows them."""
    return "  ".join(f"{label} {metrics[name]:{form}}" for name, (label, form) in SHOWN.items() if name in metrics)


def without_zeros(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics without the shares of failures that are 0."""
    counts = ("unscored", "reward_failed", "reward_failed_std")
    return {name: value for name, value in metrics.items() if value or name.rpartition("/")[2] not in counts}


def group_table(groups: Mapping[str, WorkerGroup]) -> Table:
    """Return a table with a row for every group: its worker class, layout, processes, and their threads on the CPU."""
    table = Table("group", "worker", "layout", "processes", "threads", title="Groups", title_justify="left")
    for name, group in groups.items():
        nodes = len(set(group.executor.nodes))
        processes = f"{group.world_size} on {nodes} node{'s' if nodes > 1 else ''}"
        threads = sorted({thread for thread in group.executor.threads if thread is not None})
        shown = " or ".join(map(str, threads)) or "default"
        table.add_row(name, group.worker_cls.__name__, layout_text(group.topology), processes, shown)
    return table


def layout_text(topology: Topology) -> str:
    """Return a layout as ``tp 2 x pp 2 x dp 1``: tp, pp and dp always, other axes if their size is more than 1."""
    axes = _shown_axes(topology)
    return " x ".join(f"{axis} {topology.size(axis)}" for axis in axes)


def _shown_axes(topology: Topology) -> Sequence[str]:
    axes = [axis for axis in topology.dense_axes if axis != RANK_AXIS]
    kept = [axis for axis in axes if axis in ("tp", "pp", "dp") or topology.size(axis) > 1]
    order = ("tp", "cp", "pp", "dp")
    return sorted(kept, key=lambda axis: order.index(axis) if axis in order else len(order)) or [RANK_AXIS]


def _shortened(text: str) -> str:
    """Return the end of a text, on one line."""
    line = repr(text)[1:-1]
    return line if len(line) <= SHOWN_CHARACTERS else f"...{line[3 - SHOWN_CHARACTERS :]}"
