"""Show what a run does now: its process, what each rank is in, last metrics, stages and events; refreshed until Ctrl-C.

Only files of the run directory are read, so the run may be on another machine that shares the directory.

examples: mcontroller top runs/20260101-120000
          mcontroller top runs/20260101-120000 --once
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mcontroller.config.checks import check_above
from mcontroller.output import printable
from mcontroller.trace.reading import RankNow, ranks_now
from trainer.report.reading import last_records, read_run, role_grids

SHOWN = ("train/score", "held_out/score", "train/accuracy", "actor/entropy", "actor/ppo_kl", "response/length")
STAGE, MEMORY = "timing_s/", "memory/"
MAX_EVENTS = 5
MAX_ROWS = 32
"""Most ranks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("run", metavar="RUN_DIR", type=Path, help="a run directory")
    parser.add_argument("--once", action="store_true", help="print one screen and end")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between two screens; default: 2")


def run(arguments: argparse.Namespace) -> int:
    """Print the screen once, or until Ctrl-C."""
    check_above("--interval", arguments.interval, 0)
    console = Console()
    if arguments.once:
        console.print(screen(arguments.run))
        return 0
    with contextlib.suppress(KeyboardInterrupt), Live(screen(arguments.run), console=console, screen=True) as live:
        while True:
            time.sleep(arguments.interval)
            live.update(screen(arguments.run), refresh=True)
    return 0


def screen(directory: Path) -> RenderableType:
    """Return what the files of a run say now.

    Raises:
        DataError: the directory is not one of a run, or a file is damaged.
    """
    found, records = read_run(directory), last_records(directory / "metrics.jsonl")
    steps = [record for record in records if f"{STAGE}step" in record]
    latest = {
        name: float(value)
        for record in records
        for name, value in record.items()
        if "/" in name and isinstance(value, int | float)
    }
    facts = dict(found.facts())
    chosen = [(name, facts[name]) for name in ("host", "step", "saved step", "restarts") if name in facts]
    process = facts.get("running process", "none holds the lock: the run has ended or was killed")
    head = [("directory", str(directory)), ("process", process), *chosen]
    if records:
        age = time.time() - (directory / "metrics.jsonl").stat().st_mtime
        usual = f"; the last steps took {_mean(steps, f'{STAGE}step'):.1f} s" if steps else ""
        head.append(("last metrics", f"{age:,.0f} s ago{usual}"))
    if "perf/tokens_per_s" in latest:
        head.append(("tokens/s", f"{latest['perf/tokens_per_s']:,.0f}"))
    groups = [(grid["roles"], f"{grid['layout']} in {grid['pool']}") for grid in role_grids(found.config)]
    shown = SHOWN if steps else list(latest)
    metrics = [(name, f"{latest[name]:.4g}") for name in shown if name in latest]
    stages = {name: _mean(steps, name) for name in latest if name.startswith(STAGE)} if steps else {}
    seconds = sorted(((name.removeprefix(STAGE), value) for name, value in stages.items()), key=lambda row: -row[1])
    memory: dict[str, float] = {}
    for name, value in latest.items():
        if name.startswith(MEMORY) and name.count("/") > 1:
            _, role, *_, kind = name.split("/")
            memory[f"{role} {kind}"] = max(value, memory.get(f"{role} {kind}", 0.0))
    side = Table.grid(padding=(0, 4))
    side.add_row(
        _table(("metric", "value"), metrics),
        _table(("stage, mean", "seconds"), [(name, f"{value:.2f}") for name, value in seconds]),
        _table(("memory", "most"), [(name, f"{value:.2f}") for name, value in memory.items()]),
    )
    now = _ranks(ranks_now(directory) if found.holder else ())
    return Group(
        _table(("", ""), head), "", _table(("group", "layout"), groups), "", now, "", side, "", _events(found.failures)
    )


def _ranks(ranks: Sequence[RankNow]) -> RenderableType:
    """Return a row for each rank, those that are longest in a method first if there are many."""
    table = Table("rank", "in", "for", "memory", box=None, padding=(0, 2, 0, 0))
    if not ranks:
        return ""
    many = len(ranks) > MAX_ROWS
    for each in sorted(ranks, key=lambda each: (not each.work, -each.since))[:MAX_ROWS] if many else ranks:
        used = "" if each.memory is None else f"{each.memory * 1e6 / 2**30:.2f} GB"
        name = f"{each.lane.about['group']} {each.lane.label()} on {each.lane.about['node']}"
        cells = name, each.work.partition(".")[2] or "no call", f"{each.since / 1e6:,.0f} s", used
        table.add_row(*(Text(printable(cell)) for cell in cells))
    if many:
        table.add_row(f".. {len(ranks) - MAX_ROWS} more")
    return table


def _mean(records: Iterable[Mapping[str, Any]], name: str) -> float:
    values = [record[name] for record in records if isinstance(record.get(name), int | float)]
    return sum(values) / len(values) if values else float("nan")


def _events(failures: Iterable[Mapping[str, Any]]) -> RenderableType:
    rows = []
    for each in list(failures)[-MAX_EVENTS:]:
        then = "restarted" if each.get("restarted") else f"the run ended: {each.get('reason')}"
        at = time.strftime("%m-%d %H:%M:%S", time.localtime(each.get("time", 0)))
        rows.append((at, f"step {each.get('step')}, {each.get('role')}: {each.get('message')} ({then})"))
    return _table(("failures", ""), rows or [("none", "")])


def _table(titles: tuple[str, str], rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(*titles, box=None, show_header=any(titles), padding=(0, 2, 0, 0))
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))  # the texts of files are not markup
    return table
