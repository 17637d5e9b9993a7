"""Dry runs on a machine with GPUs: in a process that sees none, because Megatron's device is chosen at its import."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import cloudpickle
import torch

P = ParamSpec("P")
T = TypeVar("T")


def without_gpus(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function of a module in a process that sees no GPU, if this one sees GPUs: seconds more.

    It raises what the function raises.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.cuda.is_available():
            return function(*args, **kwargs)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "call")
            file.write_bytes(cloudpickle.dumps((function.__module__, function.__name__, args, kwargs)))
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
            subprocess.run([sys.executable, "-m", __name__, str(file)], env=environment, check=True)
            result, error = cloudpickle.loads(file.read_bytes())
        if error is not None:
            raise error
        return result

    return call


def _main(file: Path) -> None:
    module, name, args, kwargs = cloudpickle.loads(file.read_bytes())
    result: Any = None
    try:
        result, error = getattr(importlib.import_module(module), name)(*args, **kwargs), None
    except Exception as raised:  # the caller raises it
        error = raised
    file.write_bytes(cloudpickle.dumps((result, error)))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
