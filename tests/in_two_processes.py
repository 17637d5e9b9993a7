"""Run all tests in two pytest processes: those on simulated ranks, which use one core, and at the same time the others.

``python -m tests.in_two_processes`` is what ``make test`` runs. With arguments, one pytest gets them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

PYTEST = [sys.executable, "-m", "pytest"]
SIMULATED = "simulated and not processes and not slow"
OTHERS = "(processes or not simulated) and not slow"


def main(arguments: list[str]) -> int:
    """Run pytest; return its exit status, of two processes the first that is not 0."""
    if arguments:
        return subprocess.run([*PYTEST, *arguments]).returncode
    with tempfile.TemporaryFile() as output:
        command = [*PYTEST, "-m", SIMULATED]
        with subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as simulated:
            others = subprocess.run([*PYTEST, "-m", OTHERS]).returncode
        output.seek(0)
        sys.stdout.write(f"\n\n{' '.join(command)}\n{output.read().decode(errors='replace')}")
    return others or simulated.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
