"""The launch script for machines that are reached with ssh, with a real ssh server on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import ROOT, processes_with, until
from tests.slurm.ssh_server import ssh_server

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_driver_trains_on_both_machines_and_nothing_is_left_when_it_ends(tmp_path: Path, interrupted: bool) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("# name and address\nhead 127.0.1.1\nworker 127.0.1.2\n")
    with ssh_server(tmp_path, "worker") as ssh:
        settings = {
            "SSH": ssh,
            "JOB_DIR": str(tmp_path / "job"),
            "RAY_TEMP_DIR": f"/tmp/ray-test-{os.getpid()}",
            "RAY_PORT": "20379",
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        command = ["launch/ssh.sh", str(hosts), "python", "tests/slurm/train.py", f"steps={0 if interrupted else 1}"]
        output = tmp_path / "output"
        with output.open("wb") as stream:
            script = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **settings}, stdout=stream, stderr=stream)
        if interrupted:
            until(lambda: "step 1 " in output.read_text() or script.poll() is not None, "step", output.read_text)
            script.send_signal(signal.SIGTERM)
        script.wait(timeout=240)
        printed = output.read_text()
        assert "node worker at 127.0.1.2" in printed, printed
        assert "ranks run on nodes 127.0.1.1, 127.0.1.1, 127.0.1.2, 127.0.1.2" in printed
        assert ("the driver got SIGTERM" if interrupted else "largest difference from one rank") in printed
        assert (script.returncode == 0) is not interrupted
        marks = [f"RAY_TEMP_DIR={settings['RAY_TEMP_DIR']}"]
        until(lambda: not processes_with(marks), "end of all processes", lambda: str(processes_with(marks)))
    assert not (tmp_path / "job" / "ray-token").exists()
