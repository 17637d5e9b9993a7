"""These tests need the plugin: ``python -m pytest -p tests.fake_cuda.plugin tests/fake_cuda``."""

from __future__ import annotations

import sys
from pathlib import Path

WITHOUT_THE_PLUGIN = {"test_selection.py"}
_need_it = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name not in WITHOUT_THE_PLUGIN]
collect_ignore = [] if "tests.fake_cuda.plugin" in sys.modules else _need_it
