"""A user's module that shadows one of our packages is reported with both paths."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.processes


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a folder that is first on sys.path, as for a user's script there."""
    program = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]\n{code}"
    return subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)


def test_a_shadowed_workers_package_is_reported_before_an_import_fails(tmp_path: Path) -> None:
    (tmp_path / "workers.py").write_text("mine = 1\n")
    done = run(tmp_path, "import mcontroller\nfrom workers import ActorConfig")
    assert str(tmp_path / "workers.py") in done.stderr
    assert str(ROOT / "workers" / "__init__.py") in done.stderr
    assert done.stderr.index("ShadowedPackageWarning") < done.stderr.index("cannot import name 'ActorConfig'")


def test_a_shadowed_parallel_state_is_an_import_error_with_both_paths(tmp_path: Path) -> None:
    (tmp_path / "parallel_state.py").write_text("mine = 1\n")
    done = run(tmp_path, "import mcontroller")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert str(tmp_path / "parallel_state.py") in last
    assert str(ROOT / "parallel_state" / "__init__.py") in last


def test_nothing_is_reported_if_nothing_is_shadowed(tmp_path: Path) -> None:
    done = run(tmp_path, "import mcontroller, workers; print(workers.__file__)")
    assert done.stdout.strip() == str(ROOT / "workers" / "__init__.py")
    assert "shadows" not in done.stderr
