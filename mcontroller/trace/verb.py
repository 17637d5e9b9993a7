"""Write the trace of a run for https://ui.perfetto.dev; print what it shows: slow ranks and the critical path.

examples: mcontroller trace runs/20260101-120000
          mcontroller trace runs/20260101-120000 --steps 10:12
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mcontroller.errors import ConfigError
from mcontroller.trace.perfetto import write_perfetto
from mcontroller.trace.reading import read_trace
from mcontroller.trace.summary import summary_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("directory", metavar="RUN_DIR", help="the directory of the run, which may be running")
    parser.add_argument("--steps", metavar="FIRST:LAST", help="steps of the trace, both included; default: all")
    parser.add_argument("--out", metavar="FILE", help="default: trace.json.gz in the directory of the run")


def run(arguments: argparse.Namespace) -> int:
    """Write the file and print the summary."""
    trace = read_trace(arguments.directory)
    if arguments.steps is not None:
        first, _, last = arguments.steps.partition(":")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ConfigError(f"--steps is {arguments.steps!r}; expected FIRST:LAST, such as 10:12", key="steps")
        trace = trace.of_steps(int(first), int(last or first))
    path = Path(arguments.out or Path(arguments.directory) / "trace.json.gz")
    write_perfetto(trace, path)
    sys.stdout.write("\n".join([*summary_lines(trace), f"open {path} in https://ui.perfetto.dev"]) + "\n")
    return 0
