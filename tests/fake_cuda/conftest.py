"""These tests need the plugin: ``python -m pytest -p tests.fake_cuda.plugin tests/fake_cuda``."""

from __future__ import annotations

import sys
from pathlib import Path

_tests = [path.name for path in Path(__file__).parent.glob("test_*.py")]
collect_ignore = [] if "tests.fake_cuda.plugin" in sys.modules else _tests
