"""On a GPU, the parts of a pass through the pipeline have the times of CUDA events in the trace."""

from __future__ import annotations

import time
from pathlib import Path

from mcontroller.trace.reading import read_trace
from mcontroller.trace.recorder import FOLDER, TraceRecorder
from mcontroller.trace.schedule import ScheduleTimers


def test_events_of_the_device_are_read_when_the_trace_is_written(tmp_path: Path) -> None:
    trace = TraceRecorder(tmp_path / FOLDER, "actor-a-0", {"group": "actor", "rank": 0})
    timers = ScheduleTimers(trace, on_gpu=True)
    began = time.monotonic_ns() // 1000
    for name in ("forward-compute", "forward-compute", "backward-compute"):
        timers(name, log_level=2).start()
        timers(name).stop()
    ended = time.monotonic_ns() // 1000
    trace.flush()
    events = read_trace(tmp_path).ranks[0].events
    assert [(event.name, event.number) for event in events] == [("forward", 0), ("forward", 1), ("backward", 0)]
    late = 20_000  # [us] the process may wait for a core between an event and the reading of the clock
    assert all(began - late <= event.begin <= event.end <= ended + late for event in events)
