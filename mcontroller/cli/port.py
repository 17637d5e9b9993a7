"""List the lines of a worker for verl 0.4 that must change here, or that would mean something else.

It reads the source and imports nothing of it. Exit status: 0 if there are no such lines, 1 if there are some, 2 if a
file cannot be read. docs/porting.md explains every rule.

example: mcontroller port my_workers/*.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from mcontroller.porting.rules import RULES, PortFinding
from mcontroller.porting.scan import scan

__all__ = ["add_arguments", "run"]

UNREADABLE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="Python files of workers or their driver")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings of every file, and their number."""
    found: list[PortFinding] = []
    for path in arguments.files:
        try:
            source = path.read_text()
            findings = scan(source)
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            sys.stderr.write(f"{path}: cannot be read as Python: {error}\n")
            return UNREADABLE
        sys.stdout.writelines(_lines(path, source.splitlines(), findings))
        found += findings
    silent = sum(RULES[each.rule].kind == "silent" for each in found)
    sys.stdout.write(
        f"{len(arguments.files)} files: {silent} findings would mean something else here, {len(found) - silent} must "
        "change\n"
    )
    return 1 if found else 0


def _lines(path: Path, source: Sequence[str], findings: Sequence[PortFinding]) -> Iterator[str]:
    for each in findings:
        rule = RULES[each.rule]
        yield f"{path}:{each.line}: {rule.kind} [{each.rule}] {rule.text}\n"
        yield f"    {source[each.line - 1].strip()}\n    -> {each.replacement}\n"
