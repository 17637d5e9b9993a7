"""The arguments that the stand-in for vLLM takes are those of the installed vLLM."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.vllm.policies import PYTHON
from tests.workers.generate.vllm import signatures


@pytest.mark.processes
def test_recorded_arguments_are_those_of_the_installed_vllm() -> None:
    program = "import json, runpy, sys; print(json.dumps(runpy.run_path(sys.argv[1])['installed_signatures']()))"
    run = subprocess.run([PYTHON, "-c", program, signatures.__file__], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout.splitlines()[-1]) == signatures.SIGNATURES
