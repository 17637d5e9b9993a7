"""What was predicted of a run beside what its trace and its metrics show."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from mcontroller.trace.reading import RunTrace
from mcontroller.trace.summary import bubbles, calls_of

PREDICTION = "prediction.json"
"""The file of the prediction in the directory of a run."""
METRICS = "metrics.jsonl"
FEWEST_BYTES = 10_000
"""The fewest bytes of an axis that are shown."""


def predicted_lines(trace: RunTrace, directory: Path) -> list[str]:
    """Return a line for each predicted number with the measured one; none without a prediction."""
    path = directory / PREDICTION
    if not path.is_file():
        return []
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if "error" in found:
        return [f"not predicted: {found['error']}"]
    rows: list[tuple[str, str, str]] = []
    seconds = _seconds(trace)
    for work, value in found["seconds"].items():
        rows.append((f"time of {work}", f"{value:.3g} s", f"{seconds[work]:.3g} s" if work in seconds else ""))
    bubble = {each.work: each.measured for each in bubbles(trace)}
    for work, value in found["bubble"].items():
        rows.append((f"bubble of {work}", f"{value:.0%}", f"{bubble[work]:.0%}" if work in bubble else ""))
    for work, groups in found["bytes"].items():
        measured, axes = measured_bytes(trace).get(work, {}), defaultdict[str, list[float]](lambda: [0.0, 0.0])
        for group, (axis, value) in groups.items():
            axes[axis][0] += value
            axes[axis][1] += measured.get(group, 0.0)
        for axis, (value, had) in ((axis, each) for axis, each in axes.items() if max(each) >= FEWEST_BYTES):
            rows.append((f"bytes of {axis} in {work}", f"{value / 1e6:.3g} MB", f"{had / 1e6:.3g} MB" if had else ""))
    memory = _memory(directory / METRICS)
    for role, value in found["memory"].items():
        rows.append(
            (f"memory of {role}", f"{value / 2**30:.3g} GB", f"{memory[role]:.3g} GB" if role in memory else "")
        )
    lines = [f"  {what}: {value} predicted, {had or 'not'} measured" for what, value, had in rows]
    if not lines:
        return []
    return [f"predicted on {found['hardware']} (all rows at their largest length), and measured:", *lines]


def _seconds(trace: RunTrace) -> dict[str, float]:
    """Return the median time of each method, of the rank that takes longest."""
    calls: dict[str, dict[tuple[object, ...], int]] = defaultdict(dict)
    for lane in trace.ranks:
        for call, _ in calls_of(lane):
            key = lane.about.get("launch"), call.number
            calls[call.name][key] = max(call.took, calls[call.name].get(key, 0))
    return {work: median(each.values()) / 1e6 for work, each in calls.items()}


def measured_bytes(trace: RunTrace) -> dict[str, dict[str, float]]:
    """Return the bytes that all ranks pass to the operations of each group in a call, by method and group."""
    total: dict[str, Counter[str]] = defaultdict(Counter)
    calls: dict[str, set[tuple[object, ...]]] = defaultdict(set)
    for lane in trace.ranks:
        for call, inside in calls_of(lane):
            calls[call.name].add((lane.about.get("launch"), call.number))
            for event in inside:
                if event.name.startswith("bytes "):
                    total[call.name][event.name.removeprefix("bytes ")] += event.number
    return {work: {group: size / len(calls[work]) for group, size in each.items()} for work, each in total.items()}


def _memory(path: Path) -> dict[str, float]:
    """Return the most memory of each role in an update [2**30 bytes], from the metrics of a run."""
    found: dict[str, float] = {}
    if path.is_file():
        for line in path.read_bytes().splitlines():
            if b'"memory/' in line and line.endswith(b"}"):
                for name, value in json.loads(line).items():
                    if name.startswith("memory/") and name.endswith("/update_actor/max_allocated_gb"):
                        role = name.split("/")[1]
                        found[role] = max(value, found.get(role, 0.0))
    return found
