"""NVIDIA's unit tests of Megatron-LM on 8 simulated ranks: what becomes of a sample of them.

    python -m examples.verify.unit_tests Megatron-LM --sample 100 --seed 0

Each test runs in a process of its own, on all ranks, with one of its sets of parameters. An error says whether a test
needs a GPU, or a package or files that are missing; any other error is a failure. A failed test is run once more in one
process that is no simulated rank, with the environment variables of the rank that failed first: the same error there
"fails in a process too". One that fails while several ranks have patched an attribute, which they share, "patches
shared attributes". Outcomes are printed with the CPU seconds and the error.
"""

import argparse
import contextlib
import importlib
import importlib.util
import io
import linecache
import multiprocessing
import os
import random
import re
import signal
import sys
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from parallel_state import cpu
from parallel_state.simulated import Simulation

FOLDER = "tests/unit_tests"
OPTIONS = ["-o", "addopts=", "-q", "-s", "-p", "no:cacheprovider", "--assert=plain"]
MOCKER = ["-p", "pytest_mock"] if importlib.util.find_spec("pytest_mock") else []
NEEDS = {
    # without it, Megatron has None or mocks in the place of its layers, and torch's norm in that of its vision model
    "needs Transformer Engine": r"[Tt]ransformer.?[Ee]ngine|\bTE[A-Z]\w+|fp8|to be not None|expected 2, got 0\)|"
    r"LayerNorm.__init__\(\) got an unexpected keyword argument 'config'",
    "needs CUDA": r"CUDA|cuda|nccl|NCCL|Stream|a GPU",
    "needs a package": "ModuleNotFoundError|ImportError|not installed|No module named|is required|datasets/utils.py|"
    r"pytest --fixtures|a suitable plugin|triton|_kernel\[|[Ff]lash|[Aa]pex|"
    "persist_layer_norm not supported by torch",
    "needs files": r"/opt/data|file doesn't exist|/workspace|download|FileNotFoundError",
}
PATCH = type(mock.patch("sys.path"))
NO_RESULT = "no result", "", None


def main(line=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--sample", type=int, default=100, help="the number of tests; default: 100")
    parser.add_argument("--skip", type=int, default=0, help="the number of them to leave out; default: 0")
    parser.add_argument("--seed", type=int, default=0, help="of the sample; default: 0")
    parser.add_argument("--ranks", type=int, default=8, help="default: 8")
    parser.add_argument("--seconds", type=int, default=300, help="the most for a test; default: 300")
    arguments = parser.parse_args(line)
    os.chdir(arguments.checkout)
    sys.path[:0] = [os.getcwd()]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # every rank of every test would load them
    cpu.install(packages=["tests"])
    importlib.import_module("parallel_state.megatron")  # patches Megatron before its first import
    tests, modules = in_fork(collected, 1200) or ([], [])
    by_function = defaultdict(list)
    for test in tests:
        by_function[test.partition("[")[0]].append(test)
    sys.stdout.write(f"{len(tests)} tests of {len(by_function)} functions can be imported\n")
    for module in modules:  # once, and not in the process of each test
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    counts = Counter()
    sample = random.Random(arguments.seed).sample(list(by_function), min(arguments.sample, len(by_function)))
    for function in sample[arguments.skip :]:
        test = random.Random(f"{arguments.seed} {function}").choice(by_function[function])
        before = os.times()
        outcome, error, rank = in_fork(partial(outcome_of, test, arguments.ranks), arguments.seconds) or NO_RESULT
        if outcome == "failed" and rank is not None:
            _, again, _ = in_fork(partial(outcome_of, test, arguments.ranks, alone=rank), 60) or NO_RESULT
            outcome = "fails in a process too" if again == error else outcome
        after = os.times()
        seconds = after.children_user + after.children_system - before.children_user - before.children_system
        counts[outcome] += 1
        sys.stdout.write(f"{outcome:<24} {seconds:6.1f} {test} {error[:200]!r}\n")
        sys.stdout.flush()
    sys.stdout.write("".join(f"{count:>5} {outcome}\n" for outcome, count in counts.most_common()))


def in_fork(function, seconds):
    """Return what a function returns in a forked process; None if it crashes or takes longer."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run():
        signal.alarm(seconds)
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        sender.send(function())

    process = context.Process(target=run)
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return None
    finally:
        process.join()


def collected():
    """Return the ids of all tests in files that can be imported, and the modules that these files import."""
    listed = io.StringIO()
    with contextlib.redirect_stdout(listed):
        pytest.main([*OPTIONS, "--collect-only", "--continue-on-collection-errors", FOLDER])
    tests = [row for row in listed.getvalue().splitlines() if row.startswith(FOLDER) and "::" in row]
    specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
    names = [spec.name for spec in specs if spec is not None and spec.origin and "site-packages" in spec.origin]
    return tests, [*names, *(name for name in list(sys.modules) if name.startswith("megatron."))]


def outcome_of(test, ranks, packages=("tests", "megatron.training"), alone=None):
    """Run a test on all ranks, each with packages of its own, or as the rank ``alone`` without simulated ranks.

    Returns what becomes of it, the first error, and the rank that had this error, if one had.
    """
    outcomes, errors = set(), []
    path = Path(test.partition("::")[0])
    if not path.with_name("__init__.py").exists():  # pytest imports the file by its own name
        packages = [*packages, path.stem]
        sys.path.insert(0, str(path.parent))
        cpu.install(packages=[path.stem])
    patches = Patches()
    run = partial(pytest.main, [*OPTIONS, *MOCKER, test], [Reports(outcomes, errors)])
    try:
        if alone is None:
            with patches.noted():
                Simulation(ranks, modules=packages).run(dict.fromkeys(range(ranks), run))
        else:
            os.environ.update(RANK=alone, LOCAL_RANK=alone, WORLD_SIZE=str(ranks), MASTER_ADDR="localhost")
            run()
    except BaseException as error:  # of the simulation
        errors.append((f"{type(error).__name__}: {error}"[:1500], None))
    if errors:
        error, rank = errors[0]
        failed = "patches shared attributes" if patches.shared else "failed"
        return next((need for need, pattern in NEEDS.items() if re.search(pattern, error)), failed), error, rank
    return ("passed" if outcomes == {"passed"} else "skipped"), "", None


class Patches:
    """Notes whether several ranks patch one attribute at a time: only the last of these patches is seen, by all."""

    def __init__(self):
        self.shared = False
        self._ranks = defaultdict(set)

    @contextlib.contextmanager
    def noted(self):
        enter, leave = PATCH.__enter__, PATCH.__exit__

        def entered(patched):
            value = enter(patched)
            ranks = self._ranks[id(patched.target), patched.attribute]
            ranks.add(os.environ.get("RANK"))
            self.shared |= len(ranks) > 1
            return value

        def left(patched, *error):
            self._ranks[id(patched.target), patched.attribute].discard(os.environ.get("RANK"))
            return leave(patched, *error)

        PATCH.__enter__, PATCH.__exit__ = entered, left
        try:
            yield
        finally:
            PATCH.__enter__, PATCH.__exit__ = enter, leave


class Reports:
    """A plugin of pytest that adds the outcomes of tests to a set, and their errors, with the ranks, to a list."""

    def __init__(self, outcomes, errors):
        self.outcomes, self.errors = outcomes, errors

    def pytest_fixture_setup(self, fixturedef, request):
        if fixturedef.argname != "ensure_test_data":
            return None
        fixturedef.cached_result = None, fixturedef.cache_key(request), None
        return True  # in place of a download

    def pytest_collectreport(self, report):
        if report.failed:
            self.add(report.longreprtext[-1000:])

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.outcomes.add(report.outcome)
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            where = crash and f"{crash.message} ({crash.path}:{crash.lineno})"
            if where and where.startswith("TypeError"):  # the line names what Megatron has None or a mock for
                where += linecache.getline(crash.path, crash.lineno)
            self.add(where or report.longreprtext[-1000:])

    def add(self, error):
        if "RankStopped" not in error:  # because of another rank, or of an error that the test did not let through
            self.errors.append((error, os.environ.get("RANK")))


if __name__ == "__main__":
    main()
