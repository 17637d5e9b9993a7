"""Faults of programs, for ``faults.py``: signals to ``mcontroller train``, its disk, its control store; then resume."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import ClassVar
from unittest.mock import patch

from ray.cluster_utils import Cluster

CONFIG = """
pool: {process_on_nodes: [4], use_gpu: false}
model: {vocab_size: 17, max_sequence_length: 12, num_layers: 2, hidden_size: 64, num_attention_heads: 2,
        ffn_hidden_size: 168}
data: {train_batch_size: 16, train: {path: SUMS}}
tokenizer: {kind: characters}
imports: [examples.ppo.tokenizer]
rewards: {timeout_s: 20, functions: {task: {function: "trainer.rewards.functions:exact_match"}}}
algorithm: {adv_estimator: grpo}
trainer: {total_training_steps: 1000, save_freq: -1, memory_save_freq: 1, max_restarts: 1000, val_before_train: false,
          test_freq: -1, restart_on: [ValueError, RuntimeError]}
trackers: [jsonl]
actor_rollout_ref:
  model: ${model}
  parallel: {tp: 2, pp: 2}
  rollout: {prompt_length: 8, response_length: 4, n: 2}
  optim: {lr: 1.0e-3}
  ppo_mini_batch_size: 16
  ppo_micro_batch_size: 8
"""

ENVIRONMENT = dict(os.environ)


def write_config(folder: Path) -> Path:
    """Write the configuration of a run, and its problems, into a folder; return the path of the configuration."""
    with open(folder / "sums.jsonl", "w") as file:
        for first, second, third in itertools.product(range(10), range(10), range(5)):
            row = {"prompt": f"Sum: {first} + {second} - {third} =", "answer": str(first + second - third)}
            file.write(json.dumps(row) + "\n")
    (folder / "run.yaml").write_text(CONFIG.replace("SUMS", str(folder / "sums.jsonl")))
    return folder / "run.yaml"


@dataclasses.dataclass
class Trial:
    """What became of a fault."""

    fault: str
    seed: int = 0
    at: float = 0.0
    before: list[int] = dataclasses.field(default_factory=list)
    known: float | None = None
    named: str = "no failure"
    again: float = 0.0
    lost: int = 0
    left: int = 0
    exact: bool = False

    results: ClassVar[Path]
    """The file of all trials."""

    def record(self) -> None:
        """Print the trial, and add it to the file, which keeps it if a later one fails."""
        line = json.dumps(dataclasses.asdict(self))
        print(line, flush=True)
        with open(self.results, "a") as file:
            file.write(line + "\n")


Strike = Callable[["Program", random.Random], None]


def signaled(number: int, moment: str) -> Strike:
    """Return a fault that sends a signal to the program in a moment, see ``Program.wait_for``."""

    def strike(program: Program, draw: random.Random) -> None:
        program.wait_for(moment)
        if moment != "save":
            time.sleep(draw.uniform(0.0, 0.5))
        program.struck = time.time()
        os.kill(program.process.pid, number)
        program.process.wait()

    return strike


def kill_gcs(program: Program, draw: random.Random) -> None:
    """Kill the control store of Ray, and wait for what becomes of the program."""
    program.wait_for("step")
    time.sleep(draw.uniform(0.0, 0.5))
    program.struck = time.time()
    for pid in program.left():
        with contextlib.suppress(OSError):
            if b"gcs_server" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
                os.kill(pid, signal.SIGKILL)
    program.process.wait()


def fill_disk(program: Program, draw: random.Random) -> None:
    program.wait_for("step")
    time.sleep(draw.uniform(0.0, 0.5))
    program.struck = time.time()
    with open(program.checkpoints / "other", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    program.process.wait()
    (program.checkpoints / "other").unlink()


GCS = "SIGKILL of the GCS, then resume"
DISK_FULL = "disk full (as root), then space and resume"
OF_PROGRAMS: dict[str, Strike] = {
    "SIGKILL of the driver, then resume": signaled(signal.SIGKILL, "step"),
    "SIGKILL of the driver before its first save, then resume": signaled(signal.SIGKILL, "first step"),
    "SIGTERM in a step, then resume": signaled(signal.SIGTERM, "step"),
    "SIGINT in a step, then resume": signaled(signal.SIGINT, "step"),
    "SIGTERM in a start, then resume": signaled(signal.SIGTERM, "start"),
    "SIGINT in a start, then resume": signaled(signal.SIGINT, "start"),
    "SIGTERM in a save, then resume": signaled(signal.SIGTERM, "save"),
    "SIGINT in a save, then resume": signaled(signal.SIGINT, "save"),
    GCS: kill_gcs,
    DISK_FULL: fill_disk,
}


def of_programs(folder: Path, names: list[str], repeats: int, seed: int) -> None:
    """Record the trials of faults of the program of a run with checkpoints every two steps of six.

    Two programs at a time compute, each in a cluster that outlives it. A third waits most of the time for the control
    store of its own.
    """
    expected = Program(folder / "whole").finish()
    others, of_gcs = SimpleQueue[tuple[int, str]](), SimpleQueue[tuple[int, str]]()
    for number, fault in enumerate(names * repeats):
        (of_gcs if fault == GCS else others).put((number, fault))

    def trials(left: SimpleQueue[tuple[int, str]], cluster: Head | None = None) -> None:
        with contextlib.suppress(Empty):
            while True:
                number, fault = left.get_nowait()
                program = Program(folder / f"{number}", disk=fault == DISK_FULL, cluster=cluster)
                OF_PROGRAMS[fault](program, random.Random(seed + number))
                trial_of(program, fault, seed + number, expected).record()

    heads = [Head(f"cluster{index}") for index in range(2)]
    try:
        with ThreadPoolExecutor(3) as pool:
            done = [pool.submit(trials, of_gcs), *(pool.submit(trials, others, head) for head in heads)]
            for future in as_completed(done):
                future.result()
    finally:
        for head in heads:
            head.cluster.shutdown()


class Head:
    """A cluster of one node."""

    def __init__(self, mark: str) -> None:
        self.mark = f"FAULTS_RUN={mark}-{os.getpid()}"
        with patch.dict(os.environ, dict([self.mark.split("=", 1)])):
            options = {"num_cpus": 4, "object_store_memory": 300_000_000, "include_dashboard": False}
            self.cluster = Cluster(initialize_head=True, head_node_args=options)

    def working(self) -> list[int]:
        """Return the processes of its workers, and those that wait for them."""
        kept = (b"ray::IDLE", b"ray::DashboardAgent", b"ray::RuntimeEnvAgent")
        found = []
        for pid in marked(self.mark):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                worker = command.startswith(b"ray::") and not command.startswith(kept)
                if worker or b"/warm_start/client.py" in command or b"/rank_logs.py" in command:
                    found.append(pid)
        return found


def marked(mark: str) -> list[int]:
    """Return the processes with this in their environment: one, and all that it and its children have started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def trial_of(program: Program, fault: str, seed: int, expected: dict[str, str]) -> Trial:
    """Resume the run of a program that has ended, and return what became of it."""
    said = ["", *(line for line in program.output() if "Error" in line or "GCS" in line)][-1]
    named = f"exit code {program.process.returncode}, {said:.160}".strip(", ")
    trial = Trial(fault, seed, at=program.struck, named=named)
    trial.known, trial.before, done = time.time() - trial.at, program.left(), len(program.steps())
    program.start("resume", str(program.folder / "run"))
    while not (said := [line for line in program.output() if "resuming from step" in line or "begins again" in line]):
        time.sleep(0.01)
        program.check()
    saved = int(said[0].split()[3]) if "resuming" in said[0] else 0
    trial.lost = max(done - saved, 0)
    while len(program.steps()) <= min(saved, 5) and program.process.poll() is None:
        time.sleep(0.01)
    trial.again = time.time() - trial.at
    trial.exact, ended = program.finish() == expected, time.time()
    while program.left() and time.time() - ended < 90:  # Ray's agents wait 60 s for its control store
        time.sleep(0.1)
    trial.left = len(program.left())
    if fault == DISK_FULL:
        subprocess.run(["umount", "--lazy", str(program.checkpoints)], check=True)
    return trial


class Program:
    """``mcontroller train`` of six steps in a process of its own."""

    def __init__(self, folder: Path, disk: bool = False, cluster: Head | None = None) -> None:
        self.folder, self.mark, self.struck, self.cluster = folder, f"FAULTS_RUN={folder}", 0.0, cluster
        self.checkpoints = folder / "run" / "checkpoints"
        folder.mkdir(parents=True)
        if disk:
            self.checkpoints.mkdir(parents=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(self.checkpoints)], check=True)
        config, on = str(write_config(folder)), [f"cluster.address={cluster.cluster.address}"] if cluster else []
        self.start("train", config, f"run_dir={folder / 'run'}", total_steps(6), "trainer.save_freq=2", *on)

    def start(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "mcontroller", *arguments]
        # Ray has chosen whether clusters of this process ask for a token.
        mode = {name: os.environ[name] for name in ("RAY_AUTH_MODE",) if name in os.environ}
        environment = ENVIRONMENT | mode | dict([self.mark.split("=", 1)])
        with open(self.folder / "output", "w") as output:
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)

    def wait_for(self, moment: str) -> None:
        """Wait for a moment of the run: see ``signaled``."""
        conditions: dict[str, Callable[[], object]] = {
            "start": lambda: any("starting actor" in line for line in self.output()),
            "first step": self.steps,
            "step": lambda: len(self.steps()) >= 3,
            "save": lambda: list(self.checkpoints.glob("actor/.saving-*")),
        }
        while not conditions[moment]():
            time.sleep(0.01)
            self.check()

    def check(self) -> None:
        """Raise SystemExit with the output if the program has ended with an error."""
        if self.process.poll():
            raise SystemExit("\n".join(self.output()))

    def output(self) -> list[str]:
        return (self.folder / "output").read_text().splitlines()

    def steps(self) -> list[str]:
        path = self.folder / "run" / "metrics.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    def left(self) -> list[int]:
        """Return the processes that this one and its children have started, and those of its group in the cluster."""
        return marked(self.mark) + (self.cluster.working() if self.cluster else [])

    def finish(self) -> dict[str, str]:
        """Wait for the end, and return the SHA-256 of the shards of the last checkpoint."""
        if self.process.wait():
            raise SystemExit("\n".join(self.output()))
        manifest = self.checkpoints / "actor" / "global_step_6" / "manifest.json"
        files = json.loads(manifest.read_text())["files"]
        return {name: entry["sha256"] for name, entry in files.items() if name.endswith(".distcp")}


def total_steps(number: int) -> str:
    return f"trainer.total_training_steps={number}"
