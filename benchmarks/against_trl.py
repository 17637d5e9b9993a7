"""GRPO next to TRL's: samples per second, memory, and accuracy over steps, on the same model, task and batch.

    make against-trl                         # speed and memory
    make against-trl ARGS=--learning         # accuracy over 120 steps
    .venv-trl/bin/python benchmarks/against_trl.py [--learning] [--steps 5] [--rounds 5]

A Llama model (hidden size 128, 4 layers, float32) continues 8 digits with 16 more, each that of 8 tokens before plus
one; the reward is the share of right digits. 32 prompts with 8 samples each make one optimizer step. Both sides start
from the same weights on disk, with the same tokenizer, sampling, learning rate, optimizer and clipping.

Each side is a program of its own with its own processes. They run alternately, a block of steps each, and wait between
their blocks. A first block is not counted. The seconds of a step are all from the end of one step to the end of the
next one: data, generation, rewards, update, metrics. Memory is read after the last block.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path

import psutil
from against_trl_task import PROMPTS, SAMPLES, Settings

HERE = Path(__file__).parent
CONFIGURATIONS: Mapping[str, tuple[int, int]] = {
    "one process, 2 threads": (1, 2),
    "one process, 1 thread": (1, 1),
    "DP2, a thread each": (2, 1),
}
"""Ranks and threads of each."""
MICRO_BATCH = {"ours": 256, "TRL": 256}
"""[rows] The fastest of 64, 128 and 256 for each side."""
WARM_UP = 3
"""[steps] Steps that are not counted."""
Step = tuple[float, float]
"""Seconds and score."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory of the processes of one side.

    Attributes:
        total: [bytes] of all processes, shared pages counted once.
        peaks: [bytes] peak resident memory of each process, shared pages counted in each, largest first.
    """

    total: int
    peaks: Sequence[tuple[str, int]]


class Side:
    """One of the two programs."""

    def __init__(self, name: str, settings: Settings) -> None:
        script = {"ours": "against_trl_ours.py", "TRL": "against_trl_peer.py"}[name]
        start = [sys.executable]
        if name == "TRL" and settings.ranks > 1:
            start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={settings.ranks}"]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(settings.threads),
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]),
            "RAY_worker_niceness": "0",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [*start, str(HERE / script), json.dumps(dataclasses.asdict(settings))]
        log = Path(settings.socket).with_suffix(".log")
        with Listener(settings.socket, "AF_UNIX") as listener, log.open("w") as output:
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            self.log = log
            self.connection = self._accept(listener)
        self.receive()

    def _accept(self, listener: Listener) -> Connection:
        """Return the connection of the program; raise if it ends before it connects."""
        listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
        while True:
            try:
                return listener.accept()
            except TimeoutError:
                if self.process.poll() is not None:
                    sys.exit(f"{self.process.args}\nended with {self.process.returncode}:\n{self.log.read_text()}")

    def receive(self) -> list[Step]:
        try:
            steps: list[Step] = self.connection.recv()
        except EOFError:
            self.process.wait()
            sys.exit(f"a side ended with {self.process.returncode}:\n{self.log.read_text()}")
        return steps

    def run(self, steps: int) -> list[Step]:
        """Run a block, and return its steps."""
        self.connection.send(steps)
        return self.receive()

    def memory(self) -> Memory:
        root = psutil.Process(self.process.pid)
        processes = [root, *root.children(recursive=True)]
        peaks = [(_title(each), _peak(each)) for each in processes]
        total = sum(each.memory_full_info().pss for each in processes)
        return Memory(total, sorted(peaks, key=lambda peak: -peak[1]))

    def close(self) -> str:
        """End the program and return what it printed."""
        self.connection.send(0)
        if self.process.wait():
            sys.exit(f"a side ended with {self.process.returncode}:\n{self.log.read_text()}")
        return self.log.read_text()


def _peak(process: psutil.Process) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    line = next((each for each in status.splitlines() if each.startswith("VmHWM")), "VmHWM: 0 kB")
    return int(line.split()[1]) * 1024


def _title(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    return next((name for name in ("gcs_server", "raylet", "scoring", "against_trl") if name in command), command[:40])


def rate(steps: Sequence[Step]) -> float:
    """Return the samples per second of the median step."""
    return PROMPTS * SAMPLES / statistics.median(seconds for seconds, _ in steps)


def compare(settings: Mapping[str, Settings], steps: int, rounds: int) -> tuple[dict[str, list[Step]], dict[str, Memory]]:
    """Return the counted steps and the memory of both sides, which run alternately."""
    sides = {name: Side(name, each) for name, each in settings.items()}
    for side in sides.values():
        side.run(WARM_UP)
    found: dict[str, list[Step]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            found[name] += side.run(steps)
    memory = {name: side.memory() for name, side in sides.items()}
    for side in sides.values():
        print("".join(f"    {line}\n" for line in side.close().splitlines() if line.startswith("seconds by stage")), end="")
    return found, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each side")
    parser.add_argument("--only", nargs="+", default=list(CONFIGURATIONS), choices=list(CONFIGURATIONS))
    parser.add_argument("--learning", action="store_true", help="accuracy over 120 steps in place of speed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="against-trl-") as directory:
        base = Settings(directory=directory, socket="", ranks=1, threads=2, steps=400, micro_batch=256)
        prepare = [sys.executable, str(HERE / "against_trl_peer.py"), "--prepare", json.dumps(dataclasses.asdict(base))]
        subprocess.run(prepare, check=True)
        for number, label in enumerate(arguments.only):
            ranks, threads = CONFIGURATIONS[label]
            settings = {
                name: dataclasses.replace(
                    base, socket=f"{directory}/{number}-{name}", ranks=ranks, threads=threads, micro_batch=MICRO_BATCH[name]
                )
                for name in MICRO_BATCH
            }
            found, memory = compare(settings, arguments.steps, arguments.rounds)
            rates = {name: rate(each) for name, each in found.items()}
            print(label, rates, rates["ours"] / rates["TRL"], memory)


if __name__ == "__main__":
    main()
