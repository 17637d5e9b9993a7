"""The Python interpreter of engines, ``rollout.vllm.python``, and whether it has vLLM.

vLLM pins packages in other versions than Transformer Engine does, so engines may run in an environment of their own.
Nothing of vLLM is imported in this process: the interpreter is asked.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys

from mcontroller.errors import ConfigError
from workers.config import ActorConfig

_TIMEOUT_S = 300.0
_FIND_VLLM = "from importlib import util; print(util.find_spec('vllm') is not None)"
_IS_FOR_CPUS = "from vllm.platforms import current_platform; print(current_platform.is_cpu())"


def interpreter_of(config: ActorConfig) -> str:
    """Return the interpreter that the engines of a configuration run with."""
    return config.rollout.vllm.python or sys.executable


def is_present(python: str) -> bool:
    """Return whether this node has an interpreter."""
    return shutil.which(python) is not None


def interpreter_variables(python: str) -> dict[str, str]:
    """Return the environment variables for an interpreter: this process's, without the paths of another interpreter."""
    others = () if python == sys.executable else ("PYTHONPATH", "PYTHONHOME")
    kept = {name: value for name, value in os.environ.items() if name not in others}
    return kept | {"PYTHONSAFEPATH": "1"}  # as the option -P, which Python 3.10 does not have


@functools.cache
def has_vllm(python: str) -> bool:
    """Return whether an interpreter has vLLM.

    Raises:
        ConfigError: the interpreter cannot be run; ``output`` is what it printed.
    """
    return _printed(python, _FIND_VLLM)[-1] == "True"


@functools.cache
def is_for_cpus(python: str) -> bool:
    """Return whether the vLLM of an interpreter is its CPU build.

    Raises:
        ConfigError: vLLM cannot be imported; ``output`` is what the interpreter printed.
    """
    return _printed(python, _IS_FOR_CPUS)[-1] == "True"


def _printed(python: str, code: str) -> list[str]:
    """Run code with an interpreter, and return the words that it printed; if there are none, it has failed."""
    try:
        result = subprocess.run(
            [python, "-c", code],
            env=interpreter_variables(python),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_TIMEOUT_S,
        )
        words, output = result.stdout.split(), (result.stdout + result.stderr).strip()
        failed = f"it ended with exit code {result.returncode}" if result.returncode or not words else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        words, output, failed = [], "", str(error)
    if failed:
        raise ConfigError(
            f"rollout.vllm.python is {python!r}, which cannot run vLLM: {failed}, and printed "
            f"{output[-500:] or 'nothing'}. Set it to the interpreter of an environment with vllm (docs/rollout.md)",
            key="rollout.vllm.python",
            value=python,
            output=output,
        )
    return words
