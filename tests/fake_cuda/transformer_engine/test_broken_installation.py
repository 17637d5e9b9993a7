"""Transformer Engine that is installed but does not import is reported before any model or process group exists."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.processes
def test_megatron_is_not_imported_with_a_broken_transformer_engine(tmp_path: Path) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise OSError('libcudnn.so.9: no such file')")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-c", "import tests.fake_cuda.plugin; from workers import MegatronWorker"]
    failed = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert failed.returncode != 0
    last = failed.stderr.strip().splitlines()[-1]
    assert "BrokenPackageError: transformer_engine is installed but cannot be imported (OSError: libcudnn.so.9" in last
