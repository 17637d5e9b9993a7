"""What a trace shows: ranks that are slower than others at the same work, and where the time goes."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median

from mcontroller.trace.reading import RunTrace, TraceEvent, TraceLane

SLOWER = 0.05
"""A rank is a straggler if it takes longer than the median of its peers by more than this share in the median call,"""
OFTEN = 0.75
"""by more than half of that in more than this share of the calls,"""
FEWEST_CALLS = 8
"""of at least so many calls,"""
SHORTEST_US = 10_000
"""and of a part of the call that takes at least so long, and a tenth of it;"""
WORTH_US, WORTH = 2_000, 0.01
"""and if that costs at least so much of the median call, and this share of the time of all steps."""
COMPUTING = ("forward", "backward", "optimizer")
"""The parts of a method that are compared by themselves."""


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than its peers, the ranks of its group with the same pipeline stage.

    Attributes:
        group: its group.
        rank: its label, with the coordinates.
        node: its node.
        work: the method, or the part of it, in which it is slower.
        slower: the median, over the calls, of its time without waiting, over the median of its peers', less 1.
        often: the share of the calls in which it is slower by more than half of ``SLOWER``.
        calls: the number of calls.
    """

    group: str
    rank: str
    node: str
    work: str
    slower: float
    often: float
    calls: int

    def __str__(self) -> str:
        return (
            f"{self.group} {self.rank} on node {self.node} is {self.slower:.0%} slower in {self.work}, in "
            f"{self.often:.0%} of {self.calls} calls"
        )


def stragglers(trace: RunTrace) -> list[Straggler]:
    """Return the ranks that are slower than their peers at the same work, the slowest first.

    Times are those without waiting for other ranks, which all ranks of a group share. On a GPU the host does not wait:
    there all ranks that communicate take equally long, and a slow one is not found.
    """
    slow, steps = [], sum(step.took for step in trace.steps().values())
    for lanes in _peers(trace.ranks):
        times: dict[str, dict[tuple[str, int], dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
        for index, lane in enumerate(lanes):
            for work, call, took in _work(lane):
                times[work][call][index] = took
        named = set[tuple[int, str]]()
        for work in sorted(times, key=lambda work: " of " not in work):  # parts first
            calls = [by_rank for by_rank in times[work].values() if len(by_rank) == len(lanes)]
            whole = times[work.rpartition(" of ")[2]]
            if len(calls) < FEWEST_CALLS or not _counts(calls, whole.values()):
                continue
            for index, lane in enumerate(lanes):
                others = [median(took for rank, took in call.items() if rank != index) for call in calls]
                ratios = [call[index] / max(other, 1) - 1 for call, other in zip(calls, others, strict=True)]
                extra = [call[index] - other for call, other in zip(calls, others, strict=True)]
                often, slower = mean(ratio > SLOWER / 2 for ratio in ratios), median(ratios)
                method = work.rpartition(" of ")[2]
                is_slow = slower > SLOWER and often > OFTEN and _is_worth(extra, steps)
                if is_slow and (work != method or (index, method) not in named):
                    named.add((index, method))
                    about = lane.about
                    slow.append(Straggler(about["group"], lane.label(), about["node"], work, slower, often, len(calls)))
    return sorted(slow, key=lambda straggler: -straggler.slower)


def _peers(lanes: Sequence[TraceLane]) -> Iterator[list[TraceLane]]:
    """Yield the lanes that do the same work: of one start of a group, with the same pipeline stage."""
    by_work: dict[tuple[str, str, int], list[TraceLane]] = defaultdict(list)
    for lane in lanes:
        key = lane.about["group"], lane.about.get("launch", ""), lane.coordinates.get("pp", 0)
        by_work[key].append(lane)
    yield from (peers for peers in by_work.values() if len(peers) > 1)


def _work(lane: TraceLane) -> Iterator[tuple[str, tuple[str, int], int]]:
    """Yield (work, call, microseconds without waiting) of each method that ran, and of the parts in it."""
    for call, inside in calls_of(lane):
        key = call.name, call.number
        yield call.name, key, call.busy
        parts = Counter[str]()
        for event in inside:
            if event.name in COMPUTING:
                parts[event.name] += event.busy
        for part, took in parts.items():
            yield f"{part} of {call.name}", key, took


def calls_of(lane: TraceLane) -> Iterator[tuple[TraceEvent, list[TraceEvent]]]:
    """Yield the methods that ran on a rank, each with the events inside it."""
    call, inside = None, list[TraceEvent]()
    for event in lane.events:
        if call is not None and event.end > call.end:
            yield call, inside
            call, inside = None, []
        if call is not None:
            inside.append(event)
        elif "." in event.name and " " not in event.name:
            call = event
    if call is not None:
        yield call, inside


def _is_worth(extra: Sequence[float], steps: int) -> bool:
    """Return whether the time that calls take more than those of peers [us] is worth mending, beside that of steps."""
    return median(extra) >= WORTH_US and sum(extra) >= WORTH * steps


def _counts(calls: Sequence[dict[int, int]], whole: Iterable[dict[int, int]]) -> bool:
    took = median(median(call.values()) for call in calls)
    return took >= max(SHORTEST_US, 0.1 * median(median(call.values()) for call in whole))


def critical_path(trace: RunTrace) -> dict[str, float]:
    """Return what the steps wait for, from the end of each back to its begin: shares of their time, the longest first.

    By method; ``controller`` is the time in which no rank runs what the step waits for.
    """
    calls: dict[tuple[object, ...], TraceEvent] = {}
    for lane in trace.ranks:
        for call, _ in calls_of(lane):
            key = lane.about["group"], lane.about.get("launch"), call.name, call.number
            calls[key] = max(calls.get(key, call), call, key=lambda event: event.end)
    took, total = Counter[str](), 0
    for step, inside in _by_step(trace, calls.values()):
        total += step.took
        at = step.end
        for call in sorted(inside, key=lambda event: -event.end):
            if call.end > at:  # at the same time as one that is on the path
                continue
            took["controller"] += at - call.end
            took[call.name] += call.took
            at = call.begin
        took["controller"] += at - step.begin
    return {name: time / max(total, 1) for name, time in took.most_common()}


def summary_lines(trace: RunTrace) -> list[str]:
    """Return what the trace shows, in a few lines."""
    steps = trace.steps()
    if not steps:
        return ["the trace has no whole step"]
    seconds = [step.took / 1e6 for step in steps.values()]
    lines = [f"{len(steps)} steps, {min(steps)} to {max(steps)}: median {median(seconds):.3g} s"]
    path = ", ".join(f"{name} {share:.0%}" for name, share in critical_path(trace).items() if share >= 0.005)
    lines.append(f"critical path: {path}")
    lines += list(map(str, stragglers(trace))) or ["no rank is slower than its peers"]
    return lines


def _by_step(trace: RunTrace, events: Iterable[TraceEvent]) -> Iterator[tuple[TraceEvent, list[TraceEvent]]]:
    """Yield each step, and the events in it."""
    steps = sorted(trace.steps().values(), key=lambda step: step.begin)
    begins, inside = [step.begin for step in steps], [list[TraceEvent]() for _ in steps]
    for event in events:
        index = bisect_right(begins, event.begin) - 1
        if index >= 0 and event.name != "step" and event.end <= steps[index].end:
            inside[index].append(event)
    return zip(steps, inside, strict=True)
