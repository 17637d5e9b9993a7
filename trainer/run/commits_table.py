"""What ``verify --commits`` prints: a line for each commit, and a report of what changed."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import parallel_state
from mcontroller.output import output_file
from parallel_state.verify.commits import History
from parallel_state.verify.program import VerifyError
from parallel_state.verify.results import Result

_EXAMPLES = Path(parallel_state.__file__).parents[1] / "examples" / "verify"
_PROGRAMS = "gpt", "moe", "mla", "hybrid", "packed"
_CACHE = Path.home() / ".cache" / "mcontroller" / "commits"
_OTHERS = "program", "rest", "against", "all", "exact", "full_size", "json", "save"

_Verified = tuple[int, dict[str, Result]]


def positive(text: str) -> int:
    """Return the number of an option of at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``--commits``."""
    group = parser.add_argument_group("every commit of a range that touches megatron/")
    group.add_argument(
        "--commits", nargs=2, metavar=("CHECKOUT", "A..B"), help="verify at these commits of a Megatron-LM repository"
    )
    group.add_argument("--program", nargs="+", dest="programs", metavar="PROGRAM", help="default: examples/verify")
    group.add_argument("--every", type=positive, default=1, metavar="N", help="every Nth commit; a change is bisected")
    group.add_argument("--report", type=output_file, metavar="FILE", help="write what changed to it, as Markdown")
    group.add_argument("--record", type=output_file, metavar="FILE", help="results by commit, a file to keep in git")
    group.add_argument("--cache", type=Path, default=_CACHE, metavar="FOLDER", help=f"of results; default: {_CACHE}")


def run_commits(arguments: argparse.Namespace) -> int:
    """Verify programs at the commits of a range, print a line for each.

    Returns:
        1 if a commit broke a layout, or if a program fails at all commits; 0 if not.

    Raises:
        VerifyError: an argument does not fit, or git rejects the range.
    """
    checkout, revisions = arguments.commits
    if others := [name for name in _OTHERS if getattr(arguments, name)]:
        raise VerifyError(
            f"--commits has --program, --layouts and --steps; leave out {', '.join(others)}", names=others
        )
    programs = arguments.programs or [f"{_EXAMPLES / name}.py:program" for name in _PROGRAMS]
    layouts, began = arguments.layouts or (), time.perf_counter()
    stored = {"cache": arguments.cache, "record": arguments.record}
    with History(Path(checkout), revisions, programs, **stored, layouts=layouts, steps=arguments.steps) as history:
        verified = list(_printed(history, history.verified(arguments.every)))
        report = [*_report(history, verified), "", f"{_summary(history, verified)} {time.perf_counter() - began:.0f} s"]
    sys.stdout.write("\n".join(["", *report, ""]))
    if arguments.report:
        arguments.report.write_text("\n".join([*report, ""]))
    pairs = pairwise(verified)
    broken = any(after[name].is_regression(before[name]) for (_, before), (_, after) in pairs for name in after)
    never_ran = any(all(results[name].failure for _, results in verified) for name in history.programs)
    return int(broken or never_ran)


def _printed(history: History, verified: Iterable[_Verified]) -> Iterator[_Verified]:
    names = " ".join(f"{name:<17}" for name in history.programs)
    sys.stdout.write(f"{'commit':<10} {'date':<10} {'CPU s':>6}  {names}\n")
    before, runs = dict[str, Result](), 0
    for index, results in verified:
        commit, ran, runs = history.commits[index], history.runs > runs, history.runs
        seconds = sum(result.seconds for result in results.values()) if ran else 0.0
        cells, first = " ".join(map(_cell, results.values())), _first_difference(results)
        sys.stdout.write(f"{commit.sha[:10]} {commit.date} {seconds:6.1f}  {cells} {first}".rstrip() + "\n")
        sys.stdout.writelines(f"  {change}\n" for change in _changes(before, results))
        sys.stdout.flush()
        before = results
        yield index, results


def _cell(result: Result) -> str:
    count = len(result.layouts)
    equal = f"{count - len(result.differing)}/{count} {result.fingerprint[:10]}"
    return f"{'fails' if result.failure else equal:<17}"


def _first_difference(results: dict[str, Result]) -> str:
    texts = [(name, text) for name, result in results.items() for text in (result.failure, *result.layouts.values())]
    return next((f"{name}: {text}" for name, text in texts if text), "")


def _changes(before: dict[str, Result], results: dict[str, Result]) -> list[str]:
    pairs = [(name, result, before[name]) for name, result in results.items() if name in before]
    return [f"{name}: {change}" for name, result, earlier in pairs for change in result.changes(earlier)]


def _report(history: History, verified: list[_Verified]) -> Iterator[str]:
    """Yield a Markdown table: commits with the same results are one row, with what the first of them changed."""
    yield f"| commits | {' | '.join(history.programs)} | changed by the first |"
    yield f"|---|{'---|' * (len(history.programs) + 1)}"
    befores = [{}, *(results for _, results in verified)]
    changes = [_changes(before, results) for before, (_, results) in zip(befores, verified, strict=False)]
    starts = [position for position, changed in enumerate(changes) if changed or not position]
    for start, end in zip(starts, [*starts[1:], len(verified)], strict=True):
        (first, results), last = verified[start], verified[end - 1][0]
        commit, rest = history.commits[first], history.commits[last]
        span = f" to `{rest.sha[:10]}` {rest.date}, {last - first + 1} commits" if last > first else ""
        what = "<br>".join([commit.subject, *changes[start]]).replace("|", "\\|") if start else ""
        cells = " | ".join(map(_markdown, results.values()))
        yield f"| `{commit.sha[:10]}` {commit.date}{span} | {cells} | {what} |"


def _markdown(result: Result) -> str:
    if result.failure:
        return "fails"
    differing = f", not {', '.join(result.differing)}" if result.differing else ""
    equal = f"{len(result.layouts) - len(result.differing)} of {len(result.layouts)} equal"
    return f"{equal}{differing}; `{result.fingerprint[:8]}`"


def _summary(history: History, verified: list[_Verified]) -> str:
    left_out = len(history.commits) - len(verified)
    between = f"; {left_out} between equal ones were left out" if left_out else ""
    return f"{len(verified)} of {len(history.commits)} commits verified, with {history.runs} processes{between},"
