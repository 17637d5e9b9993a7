"""Run tests in two pytest processes at the same time: on 2 cores, one leaves time that the other uses.

``python -m tests.in_two_processes`` is what ``make test`` runs: the tests on simulated ranks, which use one core, and
all others. With arguments, one pytest gets them. ``make test-fake-cuda`` runs it with ``--fake-cuda``: the tests with
the stand-in for Transformer Engine, and all others on the pretended device; both get further arguments.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence

from pytest import ExitCode

PYTEST = [sys.executable, "-m", "pytest"]
SIMULATED = ["-m", "simulated and not slow"]
OTHERS = ["-m", "not simulated and not slow"]
STAND_IN = ["-p", "tests.fake_cuda.with_transformer_engine", "tests/fake_cuda/transformer_engine"]
PRETENDED = [
    *("-p", "tests.fake_cuda.plugin", "tests/fake_cuda", "tests/workers"),
    *("--ignore=tests/fake_cuda/transformer_engine", "--ignore=tests/workers/gpucheck"),
]


def main(arguments: Sequence[str]) -> int:
    """Run pytest; return its exit status, of two processes the first that is not 0."""
    if arguments[:1] == ["--fake-cuda"]:
        return run_both([*STAND_IN, *arguments[1:]], [*PRETENDED, *arguments[1:]])
    if arguments:
        return subprocess.run([*PYTEST, *arguments]).returncode
    return run_both(SIMULATED, OTHERS)


def run_both(shown_later: Sequence[str], shown_now: Sequence[str]) -> int:
    """Run pytest with both lists of arguments; one of them may select no test."""
    with tempfile.TemporaryFile() as output:
        command = [*PYTEST, *shown_later]
        with subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as later:
            now = subprocess.run([*PYTEST, *shown_now]).returncode
        output.seek(0)
        sys.stdout.write(f"\n\n{' '.join(command)}\n{output.read().decode(errors='replace')}")
    statuses = {now, later.returncode}
    if statuses == {ExitCode.OK, ExitCode.NO_TESTS_COLLECTED}:
        return 0
    return now or later.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
