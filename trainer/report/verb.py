"""Write a page about a run, or about two side by side: curves, stages, samples, failures, layouts, configuration.

The page is one HTML file without links to anything: it opens without a network. It is written from the files of the
run directory, also while the run goes on.

examples: mcontroller report runs/20260101-120000
          mcontroller report runs/first runs/second --output both.html
"""

from __future__ import annotations

import argparse
import html
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from mcontroller.errors import DataError
from mcontroller.trace.reading import RunTrace, read_trace
from mcontroller.trace.recorder import FOLDER
from mcontroller.trace.summary import summary_lines
from trainer.report.reading import few_points, measured_grids, read_metrics, read_run, read_samples, role_grids
from trainer.trackers import leaves

BARS = 160
"""Most bars of the chart of stages."""
TIMING = "timing_s/"
TRACE_LINES = 100
"""Lines of each file of the trace, of about three minutes at its end, and at the end of the part before."""
FAILURE_KEYS = ("time", "step", "kind", "role", "message", "restarted", "reason")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("runs", metavar="RUN_DIR", nargs="+", type=Path, help="a run directory; two are compared")
    parser.add_argument("--output", "-o", type=Path, help="the file; default: report.html in the first RUN_DIR")


def run(arguments: argparse.Namespace) -> int:
    """Write the page and print its path."""
    if len(arguments.runs) > 2:
        raise DataError(f"{len(arguments.runs)} runs; a page shows one run, or two side by side")
    path = write_page(arguments.runs, arguments.output or arguments.runs[0] / "report.html")
    sys.stdout.write(f"{path}\n")
    return 0


def write_page(directories: Sequence[Path], path: Path) -> Path:
    """Write the page of one or two runs to ``path``, and return the path.

    Raises:
        DataError: a directory is not one of a run, one of its files is damaged, or the page cannot be written.
    """
    runs = [_content(directory.resolve()) for directory in directories]
    title = " and ".join(shown["name"] for shown in runs)
    content = {"written": time.strftime("%Y-%m-%d %H:%M:%S %z"), "runs": runs}
    data = json.dumps(content, separators=(",", ":"), default=str, allow_nan=False).replace("<", "\\u003c")
    template = (files("trainer.report") / "page.html").read_text(encoding="utf-8")
    try:
        path.write_text(template.replace("%TITLE%", html.escape(title)).replace("%DATA%", data), encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot write {path}: {error}; name another file with --output", path=str(path)) from error
    return path


def _content(directory: Path) -> dict[str, Any]:
    """Return what the page shows of a run."""
    run_files, metrics = read_run(directory), read_metrics(directory / "metrics.jsonl")
    samples, complete = read_samples(directory / "samples.jsonl")
    trace, lines = _trace(directory)
    stages = {name: few_points(*metrics[name], BARS) for name in metrics if name.startswith(TIMING)}
    return {
        "name": directory.name,
        "facts": [("directory", str(directory)), *run_files.facts()],
        "series": {name: few_points(*columns) for name, columns in metrics.items()},
        "stages": {name.removeprefix(TIMING): points for name, points in stages.items()},
        "failures": [{key: _shown(failure.get(key)) for key in FAILURE_KEYS} for failure in run_files.failures],
        "samples": [
            {key: _finite(value) if key == "tokens" else _shown(value) for key, value in sample.items()}
            for sample in samples
        ],
        "all_samples": complete,
        "trace": lines,
        "grids": measured_grids(role_grids(run_files.config), trace),
        "config": {key: _text(value) for key, value in leaves(run_files.config)},
        "changes": {key: _text(usual) for key, usual in changes.items()}
        if (changes := run_files.process().get("changes")) is not None
        else None,
    }


def _trace(directory: Path) -> tuple[RunTrace | None, list[str]]:
    """Return the end of the trace of a run and its summary; of one that cannot be read, the reason as its summary."""
    if not (directory / FOLDER).is_dir():
        return None, []
    try:
        trace = read_trace(directory, TRACE_LINES)
    except DataError as error:  # the other files of the run are shown
        return None, [error.message]
    return trace, summary_lines(trace)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _shown(value: Any) -> Any:
    """Return a value of a sample as JSON has it: NaN is no value, and other kinds are texts."""
    if isinstance(value, float):
        return _finite(value)
    return value if value is None or isinstance(value, str | int) else _text(value)


def _finite(value: Any) -> Any:
    """Return a value with None in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None
