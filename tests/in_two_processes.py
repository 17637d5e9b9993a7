"""Run tests in two pytest processes at the same time: one leaves a core idle, and its start and its collection too.

``python -m tests.in_two_processes`` is what ``make test`` runs: the tests that start processes, and the others. Both
take as long. With arguments, one pytest gets them. With ``--fake-cuda`` it is ``make test-fake-cuda``: the tests of
workers; and those of the device and of memory, then those with the stand-in for Transformer Engine. All get the other
arguments.

A process computes with one thread where a test may not ask for more: two that wait for each other on a busy core cost
as much as they compute.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

PYTEST = [sys.executable, "-m", "pytest"]
WITH_PROCESSES = [*PYTEST, "-m", "processes and not slow"]
WITHOUT = [*PYTEST, "-m", "not processes and not slow"]
FAKE_CUDA = [*PYTEST, "-p", "tests.fake_cuda.plugin"]
OF_DEVICE = [*FAKE_CUDA, "tests/fake_cuda", "tests/workers/memory", "--ignore=tests/fake_cuda/transformer_engine"]
OF_WORKERS = [*FAKE_CUDA, "tests/workers", "--ignore=tests/workers/gpucheck", "--ignore=tests/workers/memory"]
TRANSFORMER_ENGINE = [*PYTEST, "-p", "tests.fake_cuda.with_transformer_engine", "tests/fake_cuda/transformer_engine"]

ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


def run_both(command: list[str], *others: list[str]) -> int:
    """Run a command, and others one after another beside it; print its output first; return 0 if none has failed."""
    with tempfile.TemporaryFile() as output, ThreadPoolExecutor(1) as pool:
        options = {"stdout": output, "stderr": subprocess.STDOUT, "env": ONE_THREAD}
        beside = [pool.submit(subprocess.run, other, **options) for other in others]
        statuses = [subprocess.run(command).returncode, *(run.result().returncode for run in beside)]
        output.seek(0)
        names = ", ".join(" ".join(other) for other in others)
        sys.stdout.write(f"\n\n{names}\n{output.read().decode(errors='replace')}")
    return max(map(abs, statuses))


def main(arguments: list[str]) -> int:
    """Run pytest; return its exit status."""
    if arguments[:1] == ["--fake-cuda"]:
        os.environ.update(ONE_THREAD)
        return run_both(*([*command, *arguments[1:]] for command in (OF_WORKERS, OF_DEVICE, TRANSFORMER_ENGINE)))
    if arguments:
        return subprocess.run([*PYTEST, *arguments]).returncode
    return run_both(WITH_PROCESSES, WITHOUT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
