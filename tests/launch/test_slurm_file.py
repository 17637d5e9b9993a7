"""What the Slurm launch file asks for."""

from __future__ import annotations

from tests.launch.manifests import ROOT


def test_a_job_gets_all_memory_of_its_nodes() -> None:
    """Without it, a cluster's default for a CPU counts, also with ``--exclusive``."""
    options = (ROOT / "launch" / "slurm.sbatch").read_text().splitlines()
    assert "#SBATCH --mem=0" in options and "#SBATCH --exclusive" in options
