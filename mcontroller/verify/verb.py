"""Verify that a parallel layout trains the model that one process trains, on simulated ranks without a GPU.

example: mcontroller verify my_model.py:program --layouts tp=2,pp=2 tp=2,ep=2,sp

A layout is a list of axes (tp, pp, cp, dp, ep, etp, vpp) and flags: sp (sequence parallelism) and distopt (the
distributed optimizer). docs/verify.md describes the program. The exit status is 0 if all layouts are equal, and 1 if
not, or if the program cannot be verified.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

__all__ = ["add_arguments", "run"]

_COLUMNS = "{:<26} {:>5}  {:<7} {:>8} {:>7}  {}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("program", help="FILE.py:NAME or MODULE:NAME of an mcontroller.verify.Program")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--layouts", nargs="+", metavar="LAYOUT", help="such as tp=2,pp=2; default: the smallest ones")
    chosen.add_argument("--all", action="store_true", help="every layout of up to --ranks ranks that fits the program")
    parser.add_argument("--ranks", type=int, default=8, help="the most ranks of a layout of --all; default: 8")
    parser.add_argument("--steps", type=int, default=2, help="training steps in each layout; default: 2")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes to this file")


def run(arguments: argparse.Namespace) -> int:
    """Verify the layouts, print a table and what differs, and return 1 if something does."""
    from mcontroller.verify.program import load_program
    from mcontroller.verify.verifier import Verifier

    warnings.filterwarnings("ignore", module="megatron")
    verifier = Verifier(load_program(arguments.program), steps=arguments.steps)
    texts = arguments.layouts or (
        verifier.all_layouts(arguments.ranks) if arguments.all else verifier.default_layouts()
    )
    sys.stdout.write(_COLUMNS.format("layout", "ranks", "equal", "largest", "seconds", "first difference") + "\n")
    began, outcomes = time.perf_counter(), []
    for text in texts:
        outcome = verifier.verify(text)
        outcomes.append(outcome)
        equal = "yes" if outcome.equal else "NO"
        seconds = f"{outcome.seconds:.1f}"
        row = _COLUMNS.format(text, outcome.ranks, equal, f"{outcome.largest:.1e}", seconds, outcome.first())
        sys.stdout.write(row.rstrip() + "\n")
        sys.stdout.flush()
    different = [each for each in outcomes if not each.equal]
    for outcome in different:
        sys.stdout.write(f"\n{outcome.layout}\n" + "".join(f"  {line}\n" for line in outcome.lines()))
    seconds = f"{time.perf_counter() - began:.1f} s"
    sys.stdout.write(f"\n{_summary(len(outcomes), [each.layout for each in different])} in {seconds}; ")
    sys.stdout.write(f"a difference below {verifier.tolerance:.1e} of the largest value counts as rounding\n")
    if arguments.json:
        found = {"tolerance": verifier.tolerance, "layouts": [each.as_json() for each in outcomes]}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if different else 0


def _summary(count: int, different: Sequence[str]) -> str:
    if not different:
        return f"{count} layouts train the model of one process"
    return f"{len(different)} of {count} layouts do not train the model of one process"
