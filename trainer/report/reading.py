"""The files of a run directory, read for people: metrics in few points, samples, failures, layouts, facts."""

from __future__ import annotations

import itertools
import json
import math
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from mcontroller.errors import DataError
from mcontroller.files import moved_path
from mcontroller.trace.reading import RunTrace
from mcontroller.trace.recorder import MEMORY
from mcontroller.trace.summary import calls_of
from parallel_state.layout import ParallelLayout
from parallel_state.topology import Topology
from trainer.trackers import TRAIN

POINTS = 400
"""Most points of a curve; each stands for equally many steps."""
MOST_LINES = 20_000
SAMPLE_BYTES = 2_000_000
"""Most bytes of samples; of more, those of evenly spread lines."""
ROLE_OF = {"actor_rollout_ref": "actor"}
"""Key of the configuration -> name of its group, if they differ."""
MAX_RANKS = 2048
"""Most ranks of a grid."""

Record = dict[str, Any]
Curves = dict[str, tuple["array[float]", "array[float]"]]
"""Name of a metric -> its steps and its values."""


@dataclass(frozen=True)
class RunFiles:
    """The small files of a run.

    Attributes:
        directory: the run's directory.
        config: the configuration of the last process; empty if there is none.
        summary: ``summary.json``; empty if there is none.
        saved: the record of the last save, ``trainer.json``; empty before the first.
        failures: the lines of ``failures.jsonl``.
    """

    directory: Path
    config: Record
    summary: Record
    saved: Record
    failures: Sequence[Record]

    def process(self) -> Record:
        """Return what the last process of the run recorded: its command, versions and host."""
        processes: Sequence[Record] = self.summary.get("processes") or [{}]
        return processes[-1]

    def facts(self) -> list[tuple[str, str]]:
        """Return what started the run and how far it is, as names and texts; a fact without a record is left out."""
        process, summary = self.process(), {name: value for name, value in self.summary.items() if value is not None}
        total = (self.config.get("trainer") or {}).get("total_training_steps")
        metrics = self.directory / "metrics.jsonl"
        facts = {
            "command": process.get("command"),
            "host": process.get("host"),
            "commit": process.get("commit"),
            "versions": ", ".join(f"{name} {version}" for name, version in (process.get("versions") or {}).items()),
            "started": ", ".join(str(process.get("started")) for process in summary.get("processes", ())),
            "step": f"{last_step(metrics)} of {total or 'unknown'}" if metrics.is_file() else "",
            "saved step": self.saved.get("global_steps"),
            "restarts": summary.get("restarts", sum(map(_is_restart, self.failures))),
            "wall time": f"{summary['wall_s']:,.0f} s" if "wall_s" in summary else "",
        }
        return [(name, str(value)) for name, value in facts.items() if value not in (None, "")]


def _is_restart(failure: Record) -> bool:
    return bool(failure.get("restarted")) and failure.get("kind") != "PoolsResized"


def read_run(directory: Path) -> RunFiles:
    """Read the small files of a run.

    Raises:
        DataError: the directory is not one of a run, or a file is damaged.
    """
    if not any((directory / name).is_file() for name in ("config.yaml", "metrics.jsonl", "summary.json")):
        expected = "expected a run directory, with config.yaml, metrics.jsonl or summary.json"
        raise DataError(f"{directory} contains no run: {expected}", path=str(directory))
    config = _object(directory / "config.yaml")
    summary = read_summary(directory)
    given = (config.get("trainer") or {}).get("default_local_dir") or "checkpoints"
    checkpoints = moved_path(given, config.get("run_dir") or directory.absolute(), directory)
    failures = checkpoints / "failures.jsonl"
    return RunFiles(
        directory,
        config,
        summary,
        _object(checkpoints / "trainer.json"),
        list(records_of(failures.read_bytes())) if failures.is_file() else [],
    )


def read_summary(directory: Path) -> Record:
    """Return ``summary.json`` of a run; empty if there is none.

    Raises:
        DataError: it is damaged.
    """
    return _object(directory / "summary.json")


def _object(path: Path) -> Record:
    """Return the mapping in a YAML or JSON file; empty without a file, and for an empty one."""
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        content = (yaml.safe_load if path.suffix == ".yaml" else json.loads)(text) if text else {}
        reason = "" if isinstance(content, dict) else f"expected a mapping, got {type(content).__name__}"
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
    if reason:
        raise DataError(f"{path} is damaged: {reason}; restore the file, or move it away", path=str(path))
    return dict(content)


def records_of(lines: bytes) -> Iterator[Record]:
    """Yield the objects of JSON lines; the last line of a run that goes on may be incomplete."""
    for line in lines.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def last_step(metrics: Path, size: int = 1 << 17) -> int:
    """Return the last step in ``metrics.jsonl``, in its last ``size`` bytes; 0 in the warm-up, and without a file."""
    if not metrics.is_file():
        return 0
    with open(metrics, "rb") as file:
        file.seek(max(0, metrics.stat().st_size - size))
        steps = [record for record in records_of(file.read()) if isinstance(record.get("global_step"), int)]
    return int(steps[-1]["global_step"]) if steps and steps[-1].get("phase", TRAIN) == TRAIN else 0


def read_metrics(path: Path) -> Curves:
    """Return the steps and values of every metric of ``metrics.jsonl``; none without a file.

    Of more than about ``MOST_LINES`` lines, evenly spread ones and those with held-out metrics are read.
    """
    curves: Curves = {}
    if path.is_file():
        with open(path, "rb") as file:
            every = 1 + path.stat().st_size // MOST_LINES // max(1, len(file.readline()))
            file.seek(0)
            lines = (line for number, line in enumerate(file) if number % every == 0 or b'"held_out/' in line)
            for record in itertools.chain.from_iterable(map(records_of, lines)):
                step, _ = record.pop("global_step", None), record.pop("time", None)
                for name, value in record.items() if isinstance(step, int) else ():
                    if isinstance(value, int | float):
                        steps, values = curves.setdefault(name, (array("d"), array("d")))
                        steps.append(step)
                        values.append(value)
    return curves


def few_points(steps: Sequence[float], values: Sequence[float], most: int = POINTS) -> dict[str, list[float | None]]:
    """Return a curve in at most ``most`` points.

    Returns:
        ``x``, the first step of each point; ``y``, the mean of its values; ``lo`` and ``hi``, the least and the largest
        one, if a point has more than one; these have 6 digits. None for a point without a finite value.
    """
    size = math.ceil(len(values) / most) or 1
    x: list[float | None] = []
    y: list[float | None] = []
    lo: list[float | None] = []
    hi: list[float | None] = []
    for begin in range(0, len(values), size):
        part = [value for value in values[begin : begin + size] if math.isfinite(value)]
        x.append(int(steps[begin]))
        point = (sum(part) / len(part), min(part), max(part)) if part else (None, None, None)
        for points, value in zip((y, lo, hi), point, strict=True):
            points.append(value if value is None or size == 1 else float(f"{value:.6g}"))
    return {"x": x, "y": y} | ({"lo": lo, "hi": hi} if size > 1 else {})


def read_samples(path: Path) -> tuple[list[Record], bool]:
    """Return lines of ``samples.jsonl``, and whether they are all; of a large file, from evenly spread places.

    Args:
        path: the file; without one, there are no samples.
    """
    lines = path.read_bytes().splitlines() if path.is_file() else []
    every = math.ceil(sum(map(len, lines)) / SAMPLE_BYTES) or 1
    return list(records_of(b"\n".join(lines[::-every][::-1]))), every == 1


def role_grids(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the grid of ranks of each role of a configuration; roles with the same ranks share one.

    A role whose pool is not in the configuration has none.

    Returns:
        ``roles``, ``pool`` and ``layout`` as text; ``head``, the title of each pipeline stage; ``tp``, the columns of
        each; ``rows``, each a title and its cells ``[rank, node, coordinates]``, stage by stage.
    """
    nodes = {"pool": (config.get("pool") or {}).get("process_on_nodes", [])}
    pool_of: dict[str, str] = {}
    for name, pool in (config.get("pools") or {}).items():
        nodes[name] = pool["process_on_nodes"]
        pool_of |= dict.fromkeys(pool.get("roles") or [name], name)
    roles: dict[tuple[str, str], list[str]] = {}
    for role, section in config.items():
        if isinstance(section, Mapping) and isinstance(parallel := section.get("parallel"), Mapping):
            key = json.dumps({axis: parallel.get(axis) for axis in ("tp", "pp", "cp", "ep", "etp", "vpp", "order")})
            roles.setdefault((pool_of.get(role, "pool"), key), []).append(role)
    placed = [(pool, key, ", ".join(names)) for (pool, key), names in roles.items() if nodes[pool]]
    return [_grid(names, pool, nodes[pool], json.loads(key)) for pool, key, names in placed]


def measured_grids(grids: Sequence[Record], trace: RunTrace | None) -> list[Record]:
    """Return the grids with what the trace has of their ranks.

    Returns:
        As ``role_grids``, with ``measured``: for each role, ``kind``, ``what``, ``unit`` and ``values`` by rank: the
        median time without waiting of the method in which it computes longest [s], and its largest memory [MB].
    """
    times: dict[str, dict[str, dict[int, list[int]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    memory: dict[str, dict[int, int]] = defaultdict(dict)
    for lane in trace.ranks if trace is not None else ():
        role, rank = next(iter(lane.about["roles"])), lane.about["rank"]
        for call, _ in calls_of(lane):
            times[role][call.name][rank].append(call.busy)
        if used := [event.number for event in lane.events if event.name == MEMORY]:
            memory[role][rank] = max(used)
    grids_with_times = []
    for grid in grids:
        measured: list[Record] = []
        for role in (ROLE_OF.get(key, key) for key in grid["roles"].split(", ")):
            if by_method := times.get(role):
                work, durations_by_rank = max(by_method.items(), key=lambda item: sum(map(sum, item[1].values())))
                values = {rank: median(durations) / 1e6 for rank, durations in durations_by_rank.items()}
                measured.append({"kind": "time", "what": work, "unit": "s", "values": values})
            if role in memory:
                measured.append({"kind": "memory", "what": role, "unit": "MB", "values": memory[role]})
        grids_with_times.append({**grid, "measured": measured})
    return grids_with_times


def _grid(roles: str, pool: str, nodes: Sequence[int], parallel: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {axis: size for axis, size in parallel.items() if size is not None}
    topology = Topology.from_layout(ParallelLayout(sum(nodes), **sizes))
    experts = topology.expert_axes if topology.size("ep") > 1 else ()
    axes = [axis for axis in dict.fromkeys((*topology.dense_axes, *experts)) if topology.size(axis) > 1]
    node_of = list(itertools.chain.from_iterable([node] * count for node, count in enumerate(nodes)))
    rows: dict[str, list[tuple[int, int, str]]] = {}
    order = [topology.column(axis) for axis in ("dp", "cp", "pp", "tp")]
    for rank in sorted(range(topology.world_size), key=lambda rank: [column[rank] for column in order])[:MAX_RANKS]:
        at = topology.coordinates(rank)
        title = f"dp {at['dp']}" + (f", cp {at['cp']}" if topology.size("cp") > 1 else "")
        text = " ".join(f"{axis} {at[axis]}" for axis in axes)
        rows.setdefault(title, []).append((rank, node_of[rank], text))
    layout = " x ".join(f"{axis} {topology.size(axis)}" for axis in axes) or "one rank for each process"
    hidden = topology.world_size - MAX_RANKS
    return {
        "roles": roles,
        "pool": f"{pool}: {_counted(topology.world_size, 'rank')} on {_counted(len(nodes), 'node')}",
        "layout": layout + (f"; {hidden:,} ranks are not shown" if hidden > 0 else ""),
        "head": [f"stage {stage}" for stage in range(topology.size("pp"))],
        "tp": topology.size("tp"),
        "rows": list(rows.items()),
    }


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"
