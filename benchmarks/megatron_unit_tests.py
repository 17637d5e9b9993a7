"""NVIDIA's unit tests of Megatron-LM on 8 simulated ranks: a sample of them, and what becomes of each.

python benchmarks/megatron_unit_tests.py CHECKOUT --sample 100 --seed 0

Every rank runs pytest on the test. Its error says whether a test needs a GPU, or a package or data that are missing;
what else fails is printed with its error.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = "tests/unit_tests"
RANKS = 8
OPTIONS = ["-o", "addopts=", "-q", "-s", "-p", "no:cacheprovider", "-p", "no:rerunfailures", "--assert=plain"]
NEEDS = {
    "needs CUDA": r"CUDA|cuda|nccl|NCCL|[Tt]ransformer.?[Ee]ngine|TE[A-Z]\w+|triton|[Ff]lash|[Aa]pex|Stream|_C\b|no kernel",
    "needs a package": r"ModuleNotFoundError|ImportError|not installed|No module named|is required",
    "needs data": r"/opt/data|/workspace|download|FileNotFoundError",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--sample", type=int, default=100, help="the number of tests; default: 100")
    parser.add_argument("--seed", type=int, default=0, help="of the sample; default: 0")
    parser.add_argument("--test", nargs="+", help="run these in place of a sample")
    parser.add_argument("--seconds", type=int, default=120, help="the most for a test; default: 120")
    arguments = parser.parse_args()
    os.chdir(arguments.checkout)
    sys.path[:0] = [str(Path.cwd()), str(ROOT)]
    from parallel_state import cpu

    cpu.install(packages=["tests"])
    for module in ("pytest", "megatron.core.models.gpt", "megatron.core.optimizer", "parallel_state.simulated.ranks"):
        importlib.import_module(module)  # once, for all tests
    counts: Counter[str] = Counter()
    for test in arguments.test or sampled(arguments.sample, arguments.seed):
        began = time.perf_counter()
        outcome, reason = in_child(run_on_ranks, test, arguments.seconds) or ("too long", "")
        counts[outcome] += 1
        print(f"{outcome:<16} {time.perf_counter() - began:6.1f} {test} {reason[-300:]!r}", flush=True)
    print(dict(counts))


def sampled(size: int, seed: int) -> list[str]:
    tests = in_child(collected, "", 600) or []
    print(f"{len(tests)} tests in {len({test.partition('::')[0] for test in tests})} files", flush=True)
    return sorted(random.Random(seed).sample(tests, min(size, len(tests))))


def in_child(function, test: str, seconds: int):  # type: ignore[no-untyped-def]
    """Return what a function returns in a forked process, which ends after some seconds; then None."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        child = os.fork()
        if not child:
            signal.alarm(seconds)
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            result.write_text(json.dumps(function(test)))
            os._exit(0)
        os.waitpid(child, 0)
        return json.loads(result.read_text()) if result.exists() else None


def collected(_: str) -> list[str]:
    """Return the ids of all tests in files that can be imported."""
    import pytest

    listed = io.StringIO()
    with contextlib.redirect_stdout(listed):
        pytest.main([*OPTIONS, "--collect-only", "--continue-on-collection-errors", FOLDER])
    return [row for row in listed.getvalue().splitlines() if row.startswith(FOLDER) and "::" in row]


def run_on_ranks(test: str) -> tuple[str, str]:
    """Run a test on all ranks, and return what becomes of it, with the first error or the reason."""
    import pytest

    from parallel_state.simulated import Simulation

    reports = [Reports() for _ in range(RANKS)]
    simulation = Simulation(RANKS, modules=["tests"])
    try:
        simulation.run(
            {rank: lambda rank=rank: pytest.main([*OPTIONS, test], plugins=[reports[rank]]) for rank in range(RANKS)}
        )
    except BaseException as error:  # of the simulation: the others fail because of it
        reports[0].failures.append(f"{type(error).__name__}: {error}"[:1500])
    outcomes = {outcome for rank in reports for outcome in rank.outcomes}
    if failure := next((text for rank in reports for text in rank.failures), ""):
        return next((need for need, pattern in NEEDS.items() if re.search(pattern, failure)), "failed"), failure
    return ("passed" if outcomes == {"passed"} else "skipped"), ""


class Reports:
    """A plugin of pytest that keeps the outcomes of a test on a rank."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.failures: list[str] = []

    def pytest_runtest_logreport(self, report) -> None:  # type: ignore[no-untyped-def]
        if report.when == "call" or report.outcome != "passed":
            self.outcomes.append(report.outcome)
        if report.failed:
            *_, lines = report.longreprtext.split("\nE  ", 1)
            self.failures.append(lines[:1500])


if __name__ == "__main__":
    main()
