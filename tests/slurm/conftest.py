"""These tests need Slurm, an ssh server and root: ``make test-slurm``."""

from __future__ import annotations

import sys

collect_ignore_glob = [] if any("tests/slurm" in argument for argument in sys.argv) else ["test_*.py"]
