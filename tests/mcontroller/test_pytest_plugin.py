"""The pytest plugin, in a session of another project."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mcontroller

CONFTEST = "from megatron.core import DEVICE\n"
TEST = """
from megatron.core import DEVICE

def test_the_source_of_megatron_is_that_of_a_cpu():
    assert DEVICE == "cpu"
"""


@pytest.mark.processes
def test_megatron_may_be_imported_at_the_top_of_a_test_module(tmp_path: Path) -> None:
    package = tmp_path / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('DEVICE = "cuda"\n')  # in place of Megatron, whose import takes seconds
    (package.parent / "__init__.py").touch()
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_model.py").write_text(TEST)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(mcontroller.__file__).parents[1])}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "mcontroller.testing.pytest_plugin",
        "-p",
        "no:cacheprovider",
    ]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
