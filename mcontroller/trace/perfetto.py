"""Write a trace as JSON that https://ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcontroller.trace.reading import RunTrace, TraceEvent

_THREADS = {"step": 0, "stage": 1, "failure": 1}
"""The lanes of the controller by category; its calls are in the third."""


def write_perfetto(trace: RunTrace, path: Path) -> None:
    """Write a trace: one process for the controller and one for each group, with a thread for each rank.

    An arrow leads from each call that the controller sent to the method on every rank that ran it.
    """
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=6) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        for number, event in enumerate(_events(trace)):
            file.write((",\n" if number else "\n") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")


def _events(trace: RunTrace) -> Iterator[dict[str, Any]]:
    yield from _titles(0, "controller", {0: "steps", 1: "stages", 2: "calls"})
    for lane in trace.controllers:
        for event in lane.events:
            category, _, rest = event.name.partition(" ")
            name = f"step {event.number}" if category == "step" else rest if category == "stage" else event.name
            yield _slice(event, name, 0, _THREADS.get(category, 2))
    groups = sorted({lane.about["group"] for lane in trace.ranks})
    for process, group in enumerate(groups, 1):
        ranks = {lane.about["rank"]: lane for lane in trace.ranks if lane.about["group"] == group}
        yield from _titles(process, group, {rank: lane.label() for rank, lane in ranks.items()})
    for lane in trace.ranks:
        for event in (each for each in lane.events if not each.name.startswith("bytes ")):
            yield _slice(event, event.name, groups.index(lane.about["group"]) + 1, lane.about["rank"])
    yield from _arrows(trace, groups)


def _titles(process: int, name: str, threads: dict[int, str]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for thread, title in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": title}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread, "args": {"sort_index": thread}}


def _slice(event: TraceEvent, name: str, process: int, thread: int) -> dict[str, Any]:
    found = {"ph": "X", "name": name, "cat": event.name.partition(" ")[0], "pid": process, "tid": thread}
    args = {"number": event.number} if event.number >= 0 else {}
    if event.waiting:
        args["waiting_us"] = event.waiting
    return {**found, "ts": event.begin, "dur": event.took, "args": args}


def _arrows(trace: RunTrace, groups: list[str]) -> Iterator[dict[str, Any]]:
    sent: dict[tuple[str, int], list[TraceEvent]] = {}
    for lane in trace.controllers:
        for event in lane.events:
            if event.name.startswith("send "):
                sent.setdefault((event.name.removeprefix("send "), event.number), []).append(event)
    arrow = 0
    for lane in trace.ranks:
        for event in lane.events:
            calls = sent.get((event.name, event.number), [])
            # A group that was restarted counts its calls from 0 again: the last call that was sent before is the one.
            found = bisect_right(calls, event.end + lane.clock_error, key=lambda call: call.begin) - 1
            if found < 0:
                continue
            arrow += 1
            common = {"name": "call", "cat": "call", "id": arrow}
            yield {**common, "ph": "s", "pid": 0, "tid": 2, "ts": calls[found].begin}
            where = {"pid": groups.index(lane.about["group"]) + 1, "tid": lane.about["rank"]}
            yield {**common, "ph": "f", "bp": "e", **where, "ts": max(event.begin, calls[found].begin)}
