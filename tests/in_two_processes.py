"""Run tests in two pytest processes at the same time: one leaves a core idle, and its start and its collection too.

``python -m tests.in_two_processes`` is what ``make test`` runs: the tests that start processes, and the others. With
arguments, one pytest gets them. With ``--fake-cuda`` it is ``make test-fake-cuda``: the tests with the stand-in for
Transformer Engine, and the others; both get the other arguments.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

PYTEST = [sys.executable, "-m", "pytest"]
WITH_PROCESSES = [*PYTEST, "-m", "processes and not slow"]
WITHOUT = [*PYTEST, "-m", "not processes and not slow"]
FAKE_CUDA = [*PYTEST, "-p", "tests.fake_cuda.plugin", "tests/fake_cuda", "tests/workers"]
FAKE_CUDA += ["--ignore=tests/fake_cuda/transformer_engine", "--ignore=tests/workers/gpucheck"]
TRANSFORMER_ENGINE = [*PYTEST, "-p", "tests.fake_cuda.with_transformer_engine", "tests/fake_cuda/transformer_engine"]


def run_both(first: list[str], second: list[str]) -> int:
    """Run two commands, print the output of the second after the first's, and return a status that is not 0."""
    with tempfile.TemporaryFile() as output:
        with subprocess.Popen(second, stdout=output, stderr=subprocess.STDOUT) as other:
            status = subprocess.run(first).returncode
        output.seek(0)
        sys.stdout.write(f"\n\n{' '.join(second)}\n{output.read().decode(errors='replace')}")
    return status or other.returncode


def main(arguments: list[str]) -> int:
    """Run pytest; return its exit status."""
    if arguments[:1] == ["--fake-cuda"]:
        return run_both([*FAKE_CUDA, *arguments[1:]], [*TRANSFORMER_ENGINE, *arguments[1:]])
    if arguments:
        return subprocess.run([*PYTEST, *arguments]).returncode
    return run_both(WITH_PROCESSES, WITHOUT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
