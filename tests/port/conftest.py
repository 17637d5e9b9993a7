"""These tests need verl 0.4.1, in an environment of their own: ``make test-port``."""

from __future__ import annotations

import sys

collect_ignore_glob = [] if any("tests/port" in argument for argument in sys.argv) else ["test_*.py"]
