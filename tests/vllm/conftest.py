"""These tests need vLLM, in a separate environment: ``make test-vllm``."""

from __future__ import annotations

import sys

collect_ignore_glob = [] if any("tests/vllm" in argument for argument in sys.argv) else ["test_*.py"]
