"""A Slurm cluster of two nodes on this machine, jobs on it, and the death of one of its nodes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "slurm" / "cluster.sh"
DEADLINE = 240.0
"""[seconds] of a state that a job must reach; a few times what it takes on a busy machine with two cores."""


@dataclass(frozen=True)
class Job:
    """A job that was submitted, and the files that it writes."""

    cluster: SlurmCluster
    number: str
    directory: Path

    @property
    def log(self) -> str:
        """What the launch file and the driver have written."""
        path = self.directory / "job.log"
        return path.read_text() if path.exists() else ""

    def wait_for_log(self, text: str) -> None:
        """Wait until the log contains the text; raise if the job ends before."""
        until(lambda: text in self.log or self.ended, f"{text!r} in the log", lambda: self.log)
        assert text in self.log, f"the job ended without {text!r}:\n{self.log}"

    def wait(self) -> dict[str, str]:
        """Wait until the job has ended, and return Slurm's record of it."""
        until(lambda: self.ended, f"the end of job {self.number}", lambda: self.log)
        return self.record()

    def start_again(self) -> None:
        """Wait until the job is requeued, and start it now; Slurm would wait for two minutes."""
        until(lambda: self.record()["JobState"] == "PENDING", "requeued job", lambda: self.log)
        self.cluster.run("scontrol", "update", f"JobId={self.number}", "StartTime=now")

    @property
    def ended(self) -> bool:
        """Whether the job is neither pending nor running."""
        return self.record()["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")

    def record(self) -> dict[str, str]:
        """Return what ``scontrol show job`` reports."""
        shown = self.cluster.run("scontrol", "show", "job", "-o", self.number)
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def processes(self, node: str | None = None) -> list[int]:
        """Return the ids of the job's processes, or of those on one node."""
        return processes_with([f"SLURM_JOB_ID={self.number}", *([f"SLURMD_NODENAME={node}"] if node else [])])


@dataclass(frozen=True)
class SlurmCluster:
    """Slurm's daemons, started by ``cluster.sh``."""

    directory: Path

    def start(self) -> None:
        """Start the daemons, and wait until both nodes are idle."""
        subprocess.run([SCRIPT, "start", self.directory], check=True)

    def start_node(self, node: str) -> None:
        """Start the daemon of one node again."""
        subprocess.run([SCRIPT, "node", self.directory, node], check=True)

    def stop(self) -> None:
        """Stop the daemons."""
        subprocess.run([SCRIPT, "stop", self.directory], check=True)

    def submit(self, directory: Path, *driver: str, **settings: str) -> Job:
        """Submit the launch file with this driver, as a user does."""
        directory.mkdir()
        options = ["--parsable", "--gpus-per-node=4", "--time=10", f"--output={directory / 'job.log'}"]
        environment = {"JOB_DIR": str(directory), **settings}
        number = self.run("sbatch", *options, "launch/slurm.sbatch", *driver, **environment)
        return Job(self, number.strip(), directory)

    def run(self, *command: str, **variables: str) -> str:
        """Run a command of Slurm and return what it prints."""
        environment: Mapping[str, str] = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SLURM_CONF": str(self.directory / "slurm.conf"),
            **variables,
        }
        return subprocess.run(
            command, check=True, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=60
        ).stdout

    def kill_node(self, node: str, job: Job) -> None:
        """Kill at once what ends with the power of a machine: Slurm's daemons and the processes of the job."""
        daemon = int((self.directory / f"slurmd-{node}.pid").read_text())
        steps = [pid for pid in parents_of(job.processes(node)) if "slurmstepd" in command_line(pid)]
        for pid in (daemon, *steps, *job.processes(node)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # it ended with its parent
                continue


def processes_with(variables: Sequence[str]) -> list[int]:
    """Return the ids of the processes that have all of these environment variables, as ``NAME=value``."""
    processes = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it ended meanwhile
            continue
        if all(variable in environment for variable in variables):
            processes.append(int(entry.name))
    return processes


def parents_of(pids: list[int]) -> set[int]:
    """Return the ids of the parent processes."""
    stats = [Path(f"/proc/{pid}/stat") for pid in pids]
    return {int(stat.read_text().rsplit(")", 1)[1].split()[1]) for stat in stats if stat.exists()}


def command_line(pid: int) -> str:
    """Return the command of a process; empty if it has ended."""
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_bytes().replace(b"\0", b" ").decode() if path.exists() else ""


def until(condition: Callable[[], bool], what: str, detail: Callable[[], str]) -> None:
    """Wait until a condition of another process holds; raise after ``DEADLINE`` seconds."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {DEADLINE:g} s:\n{detail()}"
        time.sleep(0.2)
