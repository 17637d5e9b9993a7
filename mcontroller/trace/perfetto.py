"""Write a trace as JSON that https://ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import gzip
import itertools
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mcontroller.trace.reading import RunTrace, TraceEvent, TraceLane
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


class _Slice(NamedTuple):
    """An event in its lane: what it was, the title of the lane, its process and thread."""

    event: TraceEvent
    lane: TraceLane
    title: str
    process: int
    thread: int


def _events(trace: RunTrace) -> Iterator[dict[str, Any]]:
    groups = sorted({lane.about["group"] for lane in trace.ranks})
    for process, name in enumerate(("controller", *groups), 1):
        yield from _titles("process", process, 1, name)
    slices = [*_of_controllers(trace.controllers), *_of_ranks(trace.ranks, groups)]
    for process, thread, title in dict.fromkeys((part.process, part.thread, part.title) for part in slices):
        yield from _titles("thread", process, thread, title)
    sent: dict[tuple[str, int], list[_Slice]] = {}
    ran: dict[tuple[str, int], _Slice] = {}
    for part in slices:
        event, actor = part.event, part.lane.about.get("actor")
        if event.name.startswith("send "):
            sent.setdefault((event.name.removeprefix("send "), event.number), []).append(part)
        elif actor and "." in event.name and " " not in event.name:
            ran[f"{DATA}{actor}", event.number] = part
    arrows = itertools.count(1)
    for part in slices:
        event, source = part.event, ran.get((part.event.name, part.event.number))
        of = f"data of {source.lane.about['group']} {source.title}" if source is not None else event.name
        yield _shown(part, of)
        calls = sent.get((event.name, event.number), [])
        # A group that was restarted counts its calls from 0 again: the last call that was sent before is the one.
        index = bisect_right(calls, event.end, key=lambda call: call.event.begin) - 1
        if origin := calls[index] if index >= 0 else source:
            # Perfetto leads an arrow from the slice that has begun last, and to the one that is before it in the file.
            common = {"name": "arrow", "cat": "arrow", "id": next(arrows)}
            begin = origin.event.begin + 0.001
            yield {**common, "ph": "s", "pid": origin.process, "tid": origin.thread, "ts": begin}
            end = max(event.begin, origin.event.begin)
            yield {**common, "ph": "f", "bp": "e", "pid": part.process, "tid": part.thread, "ts": end}
    for lane in trace.ranks:
        process = groups.index(lane.about["group"]) + 2
        for event in (candidate for candidate in lane.events if candidate.name == MEMORY):
            args = {"MB": event.number}
            yield {"ph": "C", "name": f"memory of {lane.label()}", "pid": process, "ts": event.end, "args": args}


def _of_controllers(lanes: Sequence[TraceLane]) -> Iterator[_Slice]:
    for lane in lanes:
        for thread, title in _TITLES.items():
            events = [event for event in lane.events if _THREADS.get(event.name.partition(" ")[0], _CALLS) == thread]
            yield from (_Slice(event, lane, title, 1, thread + _ROW * row) for event, row in _in_rows(events))


def _of_ranks(lanes: Sequence[TraceLane], groups: Sequence[str]) -> Iterator[_Slice]:
    for lane in lanes:
        process, thread = groups.index(lane.about["group"]) + 2, _FIRST + lane.about["rank"]
        events = [event for event in lane.events if event.name != MEMORY]
        for event, row in _in_rows(events):
            yield _Slice(event, lane, lane.label(), process, thread + _ROW * row)


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


def _shown(piece: _Slice, name: str) -> dict[str, Any]:
    event = piece.event
    category, _, rest = event.name.partition(" ")
    args = {"number": event.number} if event.number >= 0 else {}
    if event.waiting:
        args["waiting_us"] = event.waiting
    name = {"step": f"step {event.number}", "stage": rest}.get(category, name)
    where = {"pid": piece.process, "tid": piece.thread, "ts": event.begin, "dur": event.took}
    return {"ph": "X", "name": name, "cat": category, **where, "args": args}
