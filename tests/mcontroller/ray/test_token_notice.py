"""Ray's notice of token authentication at its start on this machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import mcontroller.ray
from ray._private.authentication import authentication_token_setup as setup
setup._warn_token_auth_enabled()
setup._warn_token_auth_disabled()
"""


@pytest.mark.processes
def test_ray_prints_no_paragraph_about_token_authentication() -> None:
    printed = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert "oken authentication" not in printed.stdout + printed.stderr
