"""These tests need Slurm and root: ``make test-slurm``."""

from __future__ import annotations

import sys

collect_ignore = [] if any("tests/slurm" in argument for argument in sys.argv) else ["test_launch_file.py"]
