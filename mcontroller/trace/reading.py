"""Read the trace of a run: the lanes of its processes, on the clock of the controller."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from mcontroller.errors import DataError
from mcontroller.trace.recorder import CONTROLLER, FOLDER, OLD, SUFFIX

DERIVED = {"etp", "edp"}
"""Axes of experts, whose index follows from the others."""


class TraceEvent(NamedTuple):
    """What a process did in an interval.

    Attributes:
        name: what it did.
        begin: [us] by the clock of a controller, the same for all lanes.
        took: [us].
        waiting: [us] of these in which its thread waited for other ranks.
        number: of the call, the step or the micro-batch; -1 for none.
    """

    name: str
    begin: int
    took: int
    waiting: int
    number: int

    @property
    def end(self) -> int:
        """[us] by the clock of the controller."""
        return self.begin + self.took

    @property
    def busy(self) -> int:
        """[us] without those in which it waited for other ranks."""
        return self.took - self.waiting


@dataclass
class TraceLane:
    """The events of one process, in order of their begin.

    Attributes:
        about: what it has written of itself; ``group``, ``rank``, ``node`` and ``roles`` with coordinates among it.
        events: the events.
        axes: the axes on which ranks of its group differ, which its label shows.
    """

    about: dict[str, Any] = field(default_factory=dict)
    events: list[TraceEvent] = field(default_factory=list)
    axes: frozenset[str] = frozenset()

    @property
    def coordinates(self) -> dict[str, int]:
        """The index on each axis, of the first role of the process."""
        return next(iter(self.about.get("roles", {}).values()), {})

    def label(self) -> str:
        """Return the rank and its coordinates, as in ``rank 3 (tp=1 pp=0 dp=1)``."""
        axes = " ".join(f"{axis}={index}" for axis, index in self.coordinates.items() if axis in self.axes)
        return f"rank {self.about['rank']}" + (f" ({axes})" if axes else "")


@dataclass
class RunTrace:
    """The trace of a run, or of some of its steps.

    Attributes:
        controllers: the lanes of the processes that called groups, in their order; several if the run was resumed.
        ranks: the lanes of ranks, by group and rank.
    """

    controllers: list[TraceLane]
    ranks: list[TraceLane]

    def steps(self) -> dict[int, TraceEvent]:
        """Return the steps, by number; a step that was repeated has its last interval."""
        return {event.number: event for lane in self.controllers for event in lane.events if event.name == "step"}

    def of_steps(self, first: int, last: int) -> RunTrace:
        """Return the events that overlap the steps from ``first`` to ``last``, both included.

        Raises:
            DataError: the trace has none of these steps.
        """
        steps = self.steps()
        chosen = [event for number, event in steps.items() if first <= number <= last]
        if not chosen:
            has = f"has the steps {min(steps)} to {max(steps)}" if steps else "has no whole step"
            raise DataError(f"no event of the steps {first}:{last}; the trace {has}", steps=(first, last))
        begin, end = min(event.begin for event in chosen), max(event.end for event in chosen)

        def inside(lanes: list[TraceLane]) -> list[TraceLane]:
            return [replace(lane, events=[e for e in lane.events if e.end > begin and e.begin < end]) for lane in lanes]

        return RunTrace(inside(self.controllers), inside(self.ranks))


def read_trace(run_dir: Path | str, last: int | None = None) -> RunTrace:
    """Return the trace in the directory of a run. The last line of a file may be missing, as of a killed process.

    Args:
        run_dir: the directory.
        last: lines of each file whose events are read, the newest, each of about two seconds; None: all.

    Raises:
        DataError: there is no trace, or a file of it is damaged.
    """
    folder = Path(run_dir) / FOLDER
    lanes = []
    for name in sorted({path.name.removesuffix(SUFFIX).removesuffix(OLD) for path in folder.glob(f"*{SUFFIX}")}):
        files = [folder / f"{name}{old}{SUFFIX}" for old in (OLD, "")]
        lanes.append(_lane([path for path in files if path.is_file()], last))
    lanes = [lane for lane in lanes if lane.about]  # the first line of a process may be missing too
    if not lanes:
        raise DataError(f"{run_dir} has no trace: no file {folder}/*{SUFFIX} has events", path=str(folder))
    controllers = [lane for lane in lanes if lane.about["group"] == CONTROLLER]
    ranks = [lane for lane in lanes if lane.about["group"] != CONTROLLER]
    clock = controllers[0].about if controllers else lanes[0].about
    for lane in lanes:  # of other machines: by the time of day, which clusters keep equal to about a millisecond
        if lane.about["boot"] != clock["boot"]:
            ahead = lane.about["time_us"] - clock["time_us"]
            lane.events = [event._replace(begin=event.begin + ahead) for event in lane.events]
    controllers.sort(key=lambda lane: [event.begin for event in lane.events[:1]])
    _set_axes(ranks)
    ranks.sort(key=lambda lane: (lane.about["group"], lane.about["rank"]))
    return RunTrace(controllers, ranks)


def _set_axes(ranks: list[TraceLane]) -> None:
    for group in {lane.about["group"] for lane in ranks}:
        lanes = [lane for lane in ranks if lane.about["group"] == group]
        axes = frozenset(axis for lane in lanes for axis, index in lane.coordinates.items() if index) - DERIVED
        for lane in lanes:
            lane.axes = axes


def _lane(paths: list[Path], last: int | None = None) -> TraceLane:
    """Return the events of files, or those of the last lines."""
    lane = TraceLane()
    for path in paths:
        try:
            lines = [json.loads(text) for text in _lines(path)]
            lane.about |= {key: value for line in lines if isinstance(line, dict) for key, value in line.items()}
            columns = [line for line in lines if isinstance(line, list)]
            for names, begins, *others in columns if last is None else columns[-last:]:
                lane.events += map(TraceEvent, names, accumulate(begins), *others)
        except (ValueError, TypeError, zlib.error) as error:
            raise DataError(f"{path} is damaged: {type(error).__name__}: {error}", path=str(path)) from error
    lane.events.sort(key=lambda event: (event.begin, -event.took))
    return lane


def _lines(path: Path) -> list[bytes]:
    if not path.is_file():  # a full one has just got another name
        return []
    *lines, _ = zlib.decompressobj(wbits=31).decompress(path.read_bytes()).split(b"\n")
    return lines
