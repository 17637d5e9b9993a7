"""These tests need the plugin with the stand-in for Transformer Engine.

``python -m pytest -p tests.fake_cuda.with_transformer_engine tests/fake_cuda/transformer_engine``
"""

from __future__ import annotations

import sys
from pathlib import Path

collect_ignore = (
    []
    if "tests.fake_cuda.with_transformer_engine" in sys.modules
    else [path.name for path in Path(__file__).parent.glob("test_*.py")]
)
