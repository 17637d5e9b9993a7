"""These tests need the plugin: ``python -m pytest -p tests.fake_cuda.plugin tests/fake_cuda``."""

from __future__ import annotations

import sys

NEED_THE_PLUGIN = ["test_device.py", "test_memory.py", "test_device_of_a_worker.py", "test_workers.py"]
collect_ignore = [] if "tests.fake_cuda.plugin" in sys.modules else NEED_THE_PLUGIN
