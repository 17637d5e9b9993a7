"""What the Slurm launch file asks for."""

from __future__ import annotations

import subprocess

import pytest

from tests.launch.manifests import ROOT


def test_a_job_gets_all_memory_of_its_nodes() -> None:
    """Without it, a cluster's default for a CPU counts, also with ``--exclusive``."""
    options = (ROOT / "launch" / "slurm.sbatch").read_text().splitlines()
    assert "#SBATCH --mem=0" in options and "#SBATCH --exclusive" in options


@pytest.mark.processes
@pytest.mark.parametrize(
    ("status", "stopped", "reason"),
    [(137, "", "signal 9"), (75, "", "a preemption that saved the run"), (1, "", ""), (143, "TERM", "")],
)
def test_a_driver_that_was_killed_is_started_again(status: int, stopped: str, reason: str) -> None:
    text = (ROOT / "launch" / "slurm.sbatch").read_text()
    decision = text[text.index('reason=""') : text.index("lost=$(")]
    given = f"status={status}; stopped={stopped}\n{decision}\necho -n $reason"
    finished = subprocess.run(["bash", "-euc", given], capture_output=True, text=True, check=False)
    assert finished.stdout == reason
