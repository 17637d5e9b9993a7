"""What the trace of a run costs: CPU of an event times events of a step, and bytes of an hour.

    python benchmarks/trace.py RUN_DIR

RUN_DIR is a finished run of `mcontroller train`, such as of `make demo`, whose events and steps count. The CPU of an
event is that of adding it and of its share of a flush, with the events of the run itself; it counts against the wall
time of the steps on the cores of this machine, though not more of them than there are processes.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mcontroller.trace.reading import TraceLane, read_trace
from mcontroller.trace.recorder import SEGMENT_BYTES, TraceRecorder, set_recorder, start_laps
from mcontroller.trace.summary import calls_of

AT_MOST, MEGABYTES = 0.01, 20.0
EVENTS = 200_000


def cpu_of_lap() -> float:
    """Return the CPU seconds of adding an event, with the two clocks that it reads."""
    set_recorder(TraceRecorder(Path(tempfile.mkdtemp()), "lane", {}))
    laps = start_laps(number=1)
    before = time.process_time()
    for _ in range(EVENTS):
        laps("forward")
    took = (time.process_time() - before) / EVENTS
    set_recorder(None)
    return took


def cpu_without() -> float:
    """Return the CPU seconds of an event if nothing is recorded."""
    laps = start_laps(number=1)
    before = time.process_time()
    for _ in range(EVENTS):
        laps("forward")
    return (time.process_time() - before) / EVENTS


def flushed(lane: TraceLane) -> tuple[float, int]:
    """Return the CPU seconds of writing the events of a lane, every two seconds as in a run, and their bytes."""
    recorder = TraceRecorder(Path(tempfile.mkdtemp()), "lane", lane.about, segment=1 << 40)
    took, last = 0.0, 0
    for event in lane.events:
        recorder.add(event.name, event.begin * 1000, event.end * 1000, event.number, event.waiting * 1000)
        if event.begin - last > 2_000_000 or event is lane.events[-1]:
            before = time.process_time()
            recorder.flush()
            took, last = took + time.process_time() - before, event.begin
    return took, (recorder.directory / "lane.jsonl.gz").stat().st_size


def parts(lanes: Sequence[TraceLane], controllers: Sequence[TraceLane]) -> dict[str, int]:
    """Return the number of events of the calls of the controller, of generation on ranks, and of all else on ranks."""
    calls = sum(len(lane.events) for lane in controllers)
    generation = sum(
        1 + len(inside)
        for lane in lanes
        for call, inside in calls_of(lane)
        if call.name.endswith(".generate_sequences")
    )
    ranks = sum(len(lane.events) for lane in lanes) - calls - generation
    return {"calls": calls, "ranks": ranks, "generation": generation}


def main() -> None:
    """Print the table, and fail if the cost is above the bounds."""
    trace, lap = read_trace(sys.argv[1]), cpu_of_lap()
    steps = trace.steps().values()
    seconds, count = sum(step.took for step in steps) / 1e6, len(steps)
    lanes = [*trace.controllers, *trace.ranks]
    written = [flushed(lane) for lane in lanes]
    events = sum(len(lane.events) for lane in lanes)
    write = sum(took for took, _ in written) / events
    cores, size = min(len(lanes), os.cpu_count() or 1), sum(size for _, size in written)
    share = events * (lap + write) / (seconds * cores)
    hourly = min(size * 3600 / seconds / len(lanes), 2 * SEGMENT_BYTES) * 9 / 1e6  # 8 ranks and the controller
    print(f"{len(lanes)} processes, {count} steps of {seconds / count:.2f} s")
    print(f"CPU of an event: {lap * 1e6:.2f} us; {cpu_without() * 1e6:.2f} us if nothing is recorded")
    print(f"CPU of writing: {write * 1e6:.2f} us an event")
    for name, number in parts(lanes, trace.controllers).items():
        print(
            f"{name}: {number:,} events, {number * (lap + write) / (seconds * cores):.3%} of the CPU of {cores} cores"
        )
    print(f"all: {events:,} events, {share:.3%}; at most {AT_MOST:.0%}")
    print(f"{size / events:.1f} bytes an event; {hourly:.2f} MB an hour for 8 ranks; at most {MEGABYTES:.0f}")
    if share > AT_MOST or hourly > MEGABYTES:
        raise SystemExit("above the bound")


if __name__ == "__main__":
    main()
