"""A pytest plugin: the fake CUDA device with the stand-in for Transformer Engine of ``site-packages``.

Megatron-Core decides at its import whether it uses Transformer Engine, so these tests have a separate process::

    python -m pytest -p tests.fake_cuda.with_transformer_engine tests/fake_cuda/transformer_engine

Any test of the workers runs under it too. Worker processes that are forked have it; on Ray, set PYTHONPATH.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).with_name("site-packages")))

pytest_plugins = ["tests.fake_cuda.plugin"]
