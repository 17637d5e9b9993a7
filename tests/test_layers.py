"""What importing the packages loads: no torch or Ray, no transformers or Megatron, and every exported name.

Layers and circles are contracts of import-linter in pyproject.toml, which ``make lint`` checks.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PURE = (
    "parallel_state",
    "parallel_state.describe",
    "parallel_state.infos",
    "parallel_state.layout",
    "parallel_state.topology",
    "mcontroller",
    "mcontroller.dispatch.modes",
    "mcontroller.errors",
    "mcontroller.partition",
    "trainer.report.verb",
)
"""Modules that load neither torch nor Ray."""

LIGHT = ("trainer", "mcontroller.testing", "mcontroller.ray.worker_group")
"""Modules that load neither transformers nor Megatron."""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [(PURE, {"torch", "ray"}), (LIGHT, {"transformers", "megatron"})],
    ids=["pure modules load neither torch nor Ray", "the controller loads neither transformers nor Megatron"],
)
def test_importing_the_modules_does_not_load_heavy_packages(modules: tuple[str, ...], forbidden: set[str]) -> None:
    program = f"""
import importlib, sys
for name in {modules}:
    importlib.import_module(name)
    loaded = {forbidden} & set(sys.modules)
    if loaded:
        sys.exit(f"{{name}} loads {{', '.join(sorted(loaded))}}")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ["parallel_state", "mcontroller", "workers", "trainer", "mcontroller.testing"])
def test_every_exported_name_loads(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__ and all(getattr(module, name) is not None for name in module.__all__)
    with pytest.raises(AttributeError):
        _ = module.no_such_name
