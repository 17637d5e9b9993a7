"""The pins of the GPU image, into which this project is installed without its dependencies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
CHECK, PROJECT, PINS = Path(".ci/check-container"), Path("pyproject.toml"), Path("launch/container/requirements.txt")


@pytest.mark.parametrize("missing", ["pyzmq", "gguf", "tensordict", "transformer-engine"])
def test_a_requirement_that_the_image_does_not_pin_is_named(missing: str, tmp_path: Path) -> None:
    """One of the project itself, one of its extra ``hf``, and two of ``gpu``."""
    for file in (CHECK, PROJECT, PINS):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes((ROOT / file).read_bytes())
    lines = (ROOT / PINS).read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith((f"{missing}=", f"{missing}["))]
    assert len(kept) == len(lines) - 1
    (tmp_path / PINS).write_text("".join(kept))
    (tmp_path / ".venv").symlink_to(sys.prefix)
    environment = {"PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1"}  # nothing after this part of the check runs
    command = ["bash", str(tmp_path / CHECK)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert f"requirements.txt pins no version for {missing}" in result.stderr
