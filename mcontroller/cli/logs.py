"""Print the output of the ranks of a run, merged by time.

examples: mcontroller logs runs/first --role actor --tp 0
          mcontroller logs runs/first --tail 20 --follow
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from pathlib import Path

from mcontroller.errors import DataError
from mcontroller.output import printable
from mcontroller.ray.rank_logs import RankLog, find_logs, merged_lines

AXES = ("tp", "cp", "dp", "pp")
LOGS = "logs"
FOLLOW_SECONDS = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("directory", metavar="RUN_DIR", help="directory of the run, or of the files themselves")
    parser.add_argument("--role", help="only this role, such as actor")
    for name in ("rank", *AXES):
        text = "only this rank" if name == "rank" else f"only ranks with this index on {name}"
        parser.add_argument(f"--{name}", type=int, help=text)
    parser.add_argument("--tail", type=int, metavar="N", help="begin with the last N lines of the merged output")
    parser.add_argument("--follow", action="store_true", help="go on with new lines, until Ctrl-C")


def run(arguments: argparse.Namespace) -> int:
    """Print the lines, and go on with ``--follow``.

    Raises:
        DataError: the directory has no files of ranks, or none that is asked for.
    """
    given = Path(arguments.directory)
    directory = given / LOGS if (given / LOGS).is_dir() else given
    everything = find_logs(directory)
    if not any(_is_chosen(log, arguments) for log in everything) and not arguments.follow:
        has = ", ".join(map(str, everything)) or f"no file NAME-rankN.log in {directory}"
        raise DataError(f"{given} has no output of such ranks; it has {has}", path=str(directory))
    offsets: dict[str, int] = {}
    try:
        while True:
            chosen = [log for log in find_logs(directory) if _is_chosen(log, arguments)]
            lines = merged_lines(chosen, offsets)
            for line in lines if offsets or arguments.tail is None else deque(lines, max(arguments.tail, 0)):
                sys.stdout.write(printable(f"{line.time} {line.log}: {line.text}") + "\n")
            sys.stdout.flush()
            if not arguments.follow:
                return 0
            time.sleep(FOLLOW_SECONDS)
    except KeyboardInterrupt:
        return 0


def _is_chosen(log: RankLog, arguments: argparse.Namespace) -> bool:
    wanted = {axis: getattr(arguments, axis) for axis in AXES}
    return (
        arguments.role in (None, log.role)
        and arguments.rank in (None, log.rank)
        and all(index is None or log.coordinates.get(axis) == index for axis, index in wanted.items())
    )
