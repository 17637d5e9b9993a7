"""These tests need Megatron-Bridge, in a separate environment: ``make test-newest``."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("megatron.bridge") else ["test_*.py"]
