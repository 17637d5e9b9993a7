"""These tests need the plugin: ``python -m pytest -p tests.fake_cuda.plugin tests/fake_cuda``."""

from __future__ import annotations

import sys

collect_ignore = [] if "tests.fake_cuda.plugin" in sys.modules else ["test_device.py", "test_gpucheck.py", "test_memory.py"]
