"""Write a trace as JSON that https://ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mcontroller.trace.reading import RunTrace, TraceEvent
from mcontroller.trace.recorder import DATA, MEMORY

_FIRST = 100
"""The number of the first thread. For Perfetto, 0 is no thread, and the number of its process is the main thread."""
_THREADS = {"step": _FIRST, "stage": _FIRST + 1, "failure": _FIRST + 1}
"""The lanes of the controller by category; its calls are in the third."""
_CALLS = _FIRST + 2
_TITLES = {_FIRST: "steps", _FIRST + 1: "stages", _CALLS: "calls"}
_ROW = 100_000
"""Added to the number of a thread for each row of it: more than there are ranks in a group."""


def write_perfetto(trace: RunTrace, path: Path) -> None:
    """Write a trace: one process for the controller and one for each group, with a thread for each rank.

    What overlaps in a thread without one being inside the other has another row. An arrow leads from each call that the
    controller sent to the method on every rank that ran it, and from there to where its result is fetched. The memory
    of a rank is a counter.
    """
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=6) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        for number, event in enumerate(_events(trace)):
            file.write((",\n" if number else "\n") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")


def _events(trace: RunTrace) -> Iterator[dict[str, Any]]:
    groups = sorted({lane.about["group"] for lane in trace.ranks})
    for process, name in enumerate(("controller", *groups), 1):
        yield from _titles("process", process, 1, name)
    sent: dict[tuple[str, int], list[_Place]] = {}
    ran: dict[tuple[str, int], _Place] = {}
    arrows: list[tuple[_Place, _Place]] = []
    fetched: list[tuple[tuple[str, int], _Place]] = []
    actors = {lane.about.get("actor", ""): f"{lane.about['group']} {lane.label()}" for lane in trace.ranks}
    for lane in trace.controllers:
        for thread in _TITLES:
            events = [event for event in lane.events if _THREADS.get(event.name.partition(" ")[0], _CALLS) == thread]
            for event, row in _in_rows(events):
                category, _, rest = event.name.partition(" ")
                name = {"step": f"step {event.number}", "stage": rest, "data": f"data of {actors.get(rest, '')}"}
                place = _Place(event.begin, 1, thread + _ROW * row)
                yield from _titles("thread", 1, place.thread, _TITLES[thread])
                yield _slice(event, name.get(category, event.name), place)
                if category == "send":
                    sent.setdefault((rest, event.number), []).append(place)
                elif category == "data":
                    fetched.append(((rest, event.number), place))
    for lane in trace.ranks:
        process, rank = groups.index(lane.about["group"]) + 2, lane.about["rank"]
        for event in (each for each in lane.events if each.name == MEMORY):
            yield {"ph": "C", "name": f"memory of {lane.label()}", "pid": process, "ts": event.end} | {
                "args": {"MB": event.number}
            }
        for event, row in _in_rows(each for each in lane.events if not each.name.startswith((MEMORY, "bytes "))):
            place, source = _Place(event.begin, process, _FIRST + rank + _ROW * row), event.name.removeprefix(DATA)
            yield from _titles("thread", process, place.thread, lane.label())
            yield _slice(event, f"data of {actors.get(source, '')}" if source != event.name else event.name, place)
            if source != event.name:
                fetched.append(((source, event.number), place))
            calls = sent.get((event.name, event.number), [])
            # A group that was restarted counts its calls from 0 again: the last call that was sent before is the one.
            found = bisect_right(calls, event.end + lane.clock_error, key=lambda call: call.time) - 1
            if found >= 0:
                arrows.append((calls[found], place._replace(time=max(event.begin, calls[found].time))))
                end = max(event.begin, event.end - 1)
                ran[lane.about.get("actor", ""), event.number] = place._replace(time=end)
    arrows += [(ran[key], place._replace(time=max(place.time, ran[key].time))) for key, place in fetched if key in ran]
    for number, ends in enumerate(arrows, 1):
        for phase, end in zip("sf", ends, strict=True):
            where = {"pid": end.process, "tid": end.thread, "ts": end.time}
            yield {"name": "call", "cat": "call", "id": number, "ph": phase, **where} | (
                {"bp": "e"} if phase == "f" else {}
            )


class _Place(NamedTuple):
    """A moment in a lane: its time [us], process and thread."""

    time: int
    process: int
    thread: int


def _in_rows(events: Iterable[TraceEvent]) -> Iterator[tuple[TraceEvent, int]]:
    """Yield events in order of their begin, with the first row in which it is inside of or beside others."""
    rows: list[list[int]] = []
    for event in events:
        for ends in rows:
            while ends and ends[-1] <= event.begin:
                ends.pop()
        row = next((row for row, ends in enumerate(rows) if not ends or event.end <= ends[-1]), len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(event.end)
        yield event, row


def _titles(kind: str, process: int, thread: int, name: str) -> Iterator[dict[str, Any]]:
    where = {"ph": "M", "pid": process, "tid": thread}
    place = process if kind == "process" else thread % _ROW
    yield {**where, "name": f"{kind}_name", "args": {"name": name}}
    yield {**where, "name": f"{kind}_sort_index", "args": {"sort_index": place}}


def _slice(event: TraceEvent, name: str, place: _Place) -> dict[str, Any]:
    where = {"pid": place.process, "tid": place.thread, "ts": event.begin, "dur": event.took}
    args = {"number": event.number} if event.number >= 0 else {}
    if event.waiting:
        args["waiting_us"] = event.waiting
    return {"ph": "X", "name": name, "cat": event.name.partition(" ")[0], **where, "args": args}
