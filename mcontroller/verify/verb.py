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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcontroller.verify.layouts import Variant
    from mcontroller.verify.outcome import Outcome
    from mcontroller.verify.program import Program
    from mcontroller.verify.verifier import Verifier

__all__ = ["add_arguments", "run"]

_COLUMNS = "{:<32} {:>5}  {:<7} {:>8} {:>7}  {}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("program", help="FILE.py:NAME or MODULE:NAME of an mcontroller.verify.Program")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--layouts", nargs="+", metavar="LAYOUT", help="such as tp=2,pp=2; default: the smallest ones")
    chosen.add_argument("--all", action="store_true", help="every layout of up to --ranks ranks that fits the program")
    parser.add_argument("--ranks", type=int, default=8, help="the most ranks of a layout of --all; default: 8")
    parser.add_argument("--steps", type=int, default=2, help="training steps in each layout; default: 2")
    parser.add_argument("--exact", action="store_true", help="compute in float64, to tell faults from rounding")
    parser.add_argument("--shrink", type=Path, metavar="FILE", help="write the smallest failing test to this file")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the training of one process to this file")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare one process with what --save wrote")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes to this file")


def run(arguments: argparse.Namespace) -> int:
    """Verify the layouts, print a table and what differs, and return 1 if something does."""
    from mcontroller.verify.layouts import parse_layout
    from mcontroller.verify.program import load_program
    from mcontroller.verify.verifier import Verifier

    warnings.filterwarnings("ignore", module="megatron")
    program = load_program(arguments.program)
    given = [parse_layout(text) for text in arguments.layouts or ()]
    began = time.perf_counter()
    verifier = Verifier(program, steps=arguments.steps, exact=arguments.exact)
    if arguments.save:
        verifier.save(arguments.save)
    outcomes = list(_printed(_outcomes(verifier, arguments, given)))
    different = [each for each in outcomes if not each.equal]
    for outcome in different:
        sys.stdout.write(f"\n{outcome.layout}\n" + "".join(f"  {line}\n" for line in outcome.lines()))
    sys.stdout.write(f"\n{_summary(len(outcomes), len(different))} in {time.perf_counter() - began:.1f} s\n")
    sys.stdout.write(f"rounding: below {verifier.tolerance:.1e} of the largest value of a tensor\n")
    sys.stdout.write(f"fingerprint of one process: {verifier.reference.fingerprint}\n")
    if arguments.json:
        _write_json(arguments.json, verifier, outcomes)
    layouts = [each.layout for each in different if not each.layout.startswith("against ")]
    if arguments.shrink and layouts:
        _write_test(arguments, program, layouts[0])
    return 1 if different else 0


def _outcomes(verifier: Verifier, arguments: argparse.Namespace, given: Sequence[Variant]) -> Iterator[Outcome]:
    if arguments.against:
        yield verifier.against(arguments.against)
    if given:
        yield from map(verifier.verify, given)
    else:
        found = verifier.all_layouts(arguments.ranks) if arguments.all else verifier.default_layouts()
        yield from map(verifier.verify, found)


def _printed(outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
    sys.stdout.write(_COLUMNS.format("layout", "ranks", "equal", "largest", "seconds", "first difference") + "\n")
    for each in outcomes:
        figures = each.ranks, "yes" if each.equal else "NO", f"{each.largest:.1e}", f"{each.seconds:.1f}"
        sys.stdout.write(_COLUMNS.format(each.layout, *figures, each.first()).rstrip() + "\n")
        sys.stdout.flush()
        yield each


def _summary(count: int, different: int) -> str:
    if not different:
        return f"{count} layouts train the model of one process"
    return f"{different} of {count} layouts do not train the model of one process"


def _write_json(path: Path, verifier: Verifier, outcomes: Sequence[Outcome]) -> None:
    found = {
        "tolerance": verifier.tolerance,
        "fingerprint": verifier.reference.fingerprint,
        "layouts": [each.as_json() for each in outcomes],
    }
    path.write_text(json.dumps(found, indent=1) + "\n")


def _write_test(arguments: argparse.Namespace, program: Program, layout: str) -> None:
    from mcontroller.verify.shrinking import shrink, source_of_test

    shrunk = shrink(program, layout, arguments.steps)
    if shrunk is not None:
        arguments.shrink.write_text(source_of_test(arguments.program, shrunk))
        sys.stdout.write(f"smallest program that differs: {shrunk}; {arguments.shrink} fails because of it\n")
