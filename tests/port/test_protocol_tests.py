"""verl 0.4.1's own tests of DataProto, over an alias package: all pass but those that docs/porting.md explains."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = Path(sys.prefix) / "verl-tests" / "test_protocol_on_cpu.py"

DIFFERENT = {
    "test_union_tensor_dict",
    "test_tensor_dict_constructor",
    "test_chunk_concat",
    "test_dataproto_unfold_column_chunks",
}


def test_verls_tests_of_the_protocol_pass_but_those_of_the_page() -> None:
    paths = os.pathsep.join((str(ROOT / "tests" / "port" / "alias"), str(ROOT)))
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "-c", os.devnull]
    # --import-mode: the tests are in a package, whose parent folder would be put in front of the alias.
    command += ["--import-mode=importlib", f"--rootdir={TESTS.parent}", str(TESTS)]
    ran = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, cwd=TESTS.parent, capture_output=True, text=True, check=False
    )
    failed = set(re.findall(r"^(?:FAILED|ERROR) \S+::(\w+)", ran.stdout, re.MULTILINE))
    assert failed == DIFFERENT, ran.stdout
    summary = re.search(r"(\d+) failed, (\d+) passed", ran.stdout)
    assert summary is not None and summary.groups() == ("4", "13")
    page = (ROOT / "docs" / "porting.md").read_text()
    assert "of 17 tests, 13 pass" in page
    assert all(f"`{name}`" in page for name in DIFFERENT)
