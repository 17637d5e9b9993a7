"""Ending processes of a node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcontroller.ray.node_processes import NodeProcess, end_processes

pytestmark = pytest.mark.processes


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "100"])
    yield process
    process.kill()
    process.wait()


def node_process(process: subprocess.Popen[bytes]) -> NodeProcess:
    stat = Path(f"/proc/{process.pid}/stat").read_bytes()
    return NodeProcess(process.pid, int(stat.rpartition(b")")[2].split()[19]), None)


def test_a_stopped_process_is_reported_and_ended(sleeper: subprocess.Popen[bytes]) -> None:
    process = node_process(sleeper)
    assert process.runs and process.state in "RS"
    sleeper.send_signal(signal.SIGSTOP)
    os.waitpid(sleeper.pid, os.WUNTRACED)
    assert process.state == "T"
    sleeper.terminate()  # has no effect on it yet
    assert end_processes([process], patience=0.1, seconds=10) == []
    assert sleeper.wait() == -signal.SIGKILL
    assert not process.runs


def test_a_process_with_the_id_of_an_ended_one_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    assert end_processes([node_process(sleeper)._replace(started=1)], patience=0, seconds=0) == []
    assert sleeper.poll() is None


def test_a_title_cut_in_the_middle_of_a_character_is_no_obstacle() -> None:
    title = Path("/proc/self/comm")
    before = title.read_bytes()
    title.write_bytes(b"ray::a rank 0 \xc2")
    try:
        assert NodeProcess.this().runs
    finally:
        title.write_bytes(before)


@pytest.mark.skipif(os.getuid() != 0, reason="needs a process of another user")
def test_a_process_that_cannot_be_ended_is_reported(sleeper: subprocess.Popen[bytes]) -> None:
    process = tuple(node_process(sleeper))
    source = (
        "import os; from mcontroller.ray.node_processes import NodeProcess, end_processes; os.setuid(65534); "
        f"print(end_processes([NodeProcess(*{process!r})], 0, 0))"
    )
    printed = subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, text=True).stdout
    assert f"pid {sleeper.pid} on " in printed and "in state S" in printed
