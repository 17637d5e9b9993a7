"""Run all tests in two pytest processes: those on simulated ranks, which use one core, and at the same time the others.

``python -m tests.in_two_processes`` is what ``make test`` runs. With arguments, one pytest gets them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

from pytest import ExitCode

PYTEST = [sys.executable, "-m", "pytest"]


def main(arguments: list[str]) -> int:
    """Run pytest; return its exit status, of two processes the first that is not 0."""
    if arguments:
        return subprocess.run([*PYTEST, *arguments]).returncode
    with tempfile.TemporaryFile() as output:
        command = [*PYTEST, "-m", "simulated and not slow"]
        with subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as simulated:
            others = subprocess.run([*PYTEST, "-m", "not simulated and not slow"]).returncode
        output.seek(0)
        sys.stdout.write(f"\n\n{' '.join(command)}\n{output.read().decode(errors='replace')}")
    nothing = simulated.returncode == ExitCode.NO_TESTS_COLLECTED  # with a torch for CUDA, no rank is simulated
    return others or (0 if nothing else simulated.returncode)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
