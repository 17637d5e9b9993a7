"""Memory that a step frees is there for the next one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

STEPS = """
import resource, sys, threading
import torch
from parallel_state.cpu_memory import keep_freed_memory

def step():
    held = [torch.ones(1_250_000) for _ in range(30)]  # 150 MB in blocks of 5 MB
    small = [torch.ones(25_000) for _ in range(200)]

def steps():
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

if sys.argv[1] == "kept":
    keep_freed_memory()
thread = threading.Thread(target=steps)
thread.start()
thread.join()
"""


def page_faults(how: str, **environment: str) -> int:
    command = [sys.executable, "-c", STEPS, how]
    given = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    ran = subprocess.run(command, env=given | environment, check=True, capture_output=True, text=True)
    return int(ran.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_a_thread_that_frees_what_it_allocates_again_causes_no_page_faults_for_it() -> None:
    assert page_faults("kept") < page_faults("left") / 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_what_the_users_environment_sets_stands() -> None:
    given = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}
    assert page_faults("kept", **given) > 2 * page_faults("kept")
