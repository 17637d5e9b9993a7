"""GRPO next to TRL's: samples per second, memory, and accuracy over steps, on the same model, task and batch.

    make against-trl                         # speed and memory
    make against-trl ARGS=--learning         # accuracy over 120 steps
    python benchmarks/against_trl.py [--learning [STEPS]] [--steps 4] [--rounds 6]

A Llama model (hidden size 128, 4 layers, float32) continues 8 digits with 16 more, each the digit 8 tokens before plus
one; the reward is the share of right digits. 32 prompts with 8 samples each make one optimizer step. Both sides start
from the same weights on disk, with the same tokenizer, sampling, learning rate, optimizer and clipping.

Each side is a separate program with its own processes. They run alternately, a block of steps each, and wait between
their blocks. A first block is not counted. The seconds of a step are all from the end of one step to the end of the
next one: data, generation, rewards, update, metrics. Memory is read after the last block.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
PARTS = ROOT / "benchmarks" / "parts"
PYTHON = ROOT / ".venv-trl" / "bin" / "python"

DIGITS = "0123456789"
PAD, EOS = "<pad>", "<eos>"
PROMPT, RESPONSE = 8, 16
"""[tokens] Lengths of every prompt, and of every response."""
PROMPTS, SAMPLES = 32, 8
"""Prompts of a step, and responses to each."""

CONFIGURATIONS: Mapping[str, tuple[int, int]] = {
    "one process, 2 threads": (1, 2),
    "one process, 1 thread": (1, 1),
    "DP2, a thread each": (2, 1),
}
"""Ranks and threads of each."""
MICRO_BATCH = {"ours": 256, "TRL": 256}
"""[rows] The whole batch of a rank in one pass; with 64 rows ours takes 4% longer."""
WARM_UP = 3
"""[steps] Steps that are not counted."""
Step = tuple[float, float]
"""Seconds and score."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of one side, as JSON in the only argument of its program."""

    directory: str
    """Directory with the initial model and tokenizer in ``model``, the prompts, and the socket of the parent."""
    socket: str
    """Socket on which the parent waits for this side."""
    ranks: int
    """Processes with a copy of the model each."""
    threads: int
    """Threads of each of them."""
    steps: int
    """Steps of the run, of one optimizer step each."""
    micro_batch: int
    """[rows] Rows of all ranks in one pass forward and backward."""
    lr: float = 3e-4
    """Learning rate of Adam, constant."""
    seed: int = 0
    """Seed of the order of the prompts, and of sampling."""

    @classmethod
    def parsed(cls, text: str) -> Settings:
        return cls(**json.loads(text))

    @property
    def model(self) -> Path:
        return Path(self.directory) / "model"

    @property
    def prompts(self) -> Path:
        return Path(self.directory) / "prompts.jsonl"


def random_prompt(numbers: random.Random) -> str:
    return "".join(numbers.choices(DIGITS, k=PROMPT))


def answer(prompt: str) -> str:
    """Return the right response: every digit is the one ``PROMPT`` tokens before, plus one (mod 10)."""
    text = prompt
    while len(text) < PROMPT + RESPONSE:
        text += DIGITS[(int(text[-PROMPT]) + 1) % 10]
    return text[PROMPT:]


def share_correct(prompt: str, response: str) -> float:
    """Return the share of the digits of a response that are right, which is its reward."""
    return sum(left == right for left, right in zip(response, answer(prompt), strict=False)) / RESPONSE


class Blocks:
    """Runs as many steps at a time as the parent asks for, and reports the seconds and the score of each.

    Args:
        socket: on which the parent listens. None on ranks that only follow.
        agree: makes all ranks wait for rank 0, and returns its value on each of them.
    """

    def __init__(self, socket: str | None, agree: Callable[[int], int] = lambda value: value) -> None:
        self.connection = None if socket is None else Client(socket)
        self.agree = agree
        self.left = 0
        self.done: list[tuple[float, float]] = []
        self.started = 0.0

    def start(self) -> bool:
        """Wait for the next block, and return whether there is one."""
        if self.connection is not None:
            self.connection.send(self.done)
        self.left = self.agree(0 if self.connection is None else int(self.connection.recv()))
        self.done, self.started = [], time.perf_counter()
        return self.left > 0

    def step_ended(self, score: float) -> bool:
        """Record a step, and return whether there is another one."""
        now = time.perf_counter()
        self.done.append((now - self.started, score))
        self.started, self.left = now, self.left - 1
        return self.left > 0 or self.start()


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory of the processes of one side.

    Attributes:
        total: [bytes] of all processes, shared pages counted once.
        peaks: [bytes] peak resident memory of each process, shared pages counted in each, largest first.
    """

    total: int
    peaks: Sequence[tuple[str, int]]

    def __str__(self) -> str:
        others = sum(peak for _, peak in self.peaks[1:])
        shown = f"the largest process {self.peaks[0][1] / 1e9:.2f} GB at its peak"
        return f"{self.total / 1e9:.2f} GB in {len(self.peaks)} processes; {shown}, the others {others / 1e9:.2f} GB"


class Side:
    """One of the two programs."""

    def __init__(self, name: str, settings: Settings) -> None:
        script = {"ours": "against_trl_ours.py", "TRL": "against_trl_peer.py"}[name]
        start = [str(PYTHON)]
        if name == "TRL" and settings.ranks > 1:
            start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={settings.ranks}"]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(settings.threads),
            "PYTHONPATH": str(ROOT),
            "RAY_worker_niceness": "0",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [*start, str(PARTS / script), json.dumps(dataclasses.asdict(settings))]
        self.log = Path(settings.socket).with_suffix(".log")
        with socket.socket(socket.AF_UNIX) as listener, self.log.open("w") as output:
            listener.bind(settings.socket)
            listener.listen()
            listener.settimeout(1.0)
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            self.connection = self._accept(listener)
        self.receive()

    def _accept(self, listener: socket.socket) -> Connection:
        """Return the connection of the program; exit if it ends before it connects."""
        while self.process.poll() is None:
            with contextlib.suppress(TimeoutError):
                accepted = listener.accept()[0]
                accepted.setblocking(True)
                return Connection(accepted.detach())
        sys.exit(f"a side ended with {self.process.returncode}:\n{self.log.read_text()}")

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
        peaks = [(_title(process), _peak(process)) for process in processes]
        total = sum(process.memory_full_info().pss for process in processes)
        return Memory(total, sorted(peaks, key=lambda peak: -peak[1]))

    def close(self) -> str:
        """End the program and return what it printed."""
        self.connection.send(0)
        if self.process.wait():
            sys.exit(f"a side ended with {self.process.returncode}:\n{self.log.read_text()}")
        return self.log.read_text()


def _peak(process: psutil.Process) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    line = next((line for line in status.splitlines() if line.startswith("VmHWM")), "VmHWM: 0 kB")
    return int(line.split()[1]) * 1024


def _title(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    return next((name for name in ("gcs_server", "raylet", "scoring", "against_trl") if name in command), command[:40])


def rate(steps: Sequence[Step]) -> float:
    """Return the samples per second of the median step."""
    return PROMPTS * SAMPLES / statistics.median(seconds for seconds, _ in steps)


def alternate(settings: Mapping[str, Settings], steps: int, rounds: int) -> tuple[dict[str, list[Step]], list[str]]:
    """Return the counted steps of both sides, which run alternately, and lines about their memory and stages."""
    sides = {name: Side(name, options) for name, options in settings.items()}
    steps_of: dict[str, list[Step]] = {name: [] for name in sides}
    uncounted = {name: side.run(WARM_UP) for name, side in sides.items()}
    for number in range(rounds):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            steps_of[name] += sides[name].run(steps)
    lines = [f"  memory, {name:4} {side.memory()}" for name, side in sides.items()]
    for side in sides.values():
        lines += [f"  {line}" for line in side.close().splitlines() if line.startswith("seconds by stage")]
    return {name: uncounted[name] + measured for name, measured in steps_of.items()}, lines


def speed(base: Settings, labels: Sequence[str], steps: int, rounds: int) -> None:
    """Print samples per second, ratios, and memory of every configuration."""
    best = 0.0
    for number, label in enumerate(labels):
        ranks, threads = CONFIGURATIONS[label]
        steps_of, lines = alternate(both(base, number, ranks, threads), steps, rounds)
        rates = {name: rate(measured[WARM_UP:]) for name, measured in steps_of.items()}
        best = max(best, rates["TRL"])
        print(
            f"{label:22} ours {rates['ours']:6.1f} samples/s, TRL {rates['TRL']:6.1f}: "
            f"ratio {rates['ours'] / rates['TRL']:.2f}, over the best of TRL so far {rates['ours'] / best:.2f}"
        )
        print("\n".join(lines), flush=True)


def learning(base: Settings, steps: int) -> None:
    """Print the share of right digits in the sampled responses over the steps of both sides."""
    steps_of, _ = alternate(both(base, 0, *CONFIGURATIONS["one process, 2 threads"]), 10, (steps - WARM_UP) // 10 + 1)
    print(accuracy_table({name: [score for _, score in measured[:steps]] for name, measured in steps_of.items()}))


def accuracy_table(scores: Mapping[str, Sequence[float]], width: int = 10) -> str:
    """Return a table in Markdown: the mean score of every ``width`` steps, of each side."""
    lines = ["| steps | " + " | ".join(scores) + " |", "|---|" + "---:|" * len(scores)]
    for first in range(0, len(next(iter(scores.values()))), width):
        means = [statistics.mean(series[first : first + width]) for series in scores.values()]
        lines.append(f"| {first + 1} to {first + width} | " + " | ".join(f"{mean:.3f}" for mean in means) + " |")
    return "\n".join(lines)


def both(base: Settings, number: int, ranks: int, threads: int) -> dict[str, Settings]:
    """Return the settings of each side."""
    return {
        name: dataclasses.replace(
            base, socket=f"{base.directory}/{number}-{name}", ranks=ranks, threads=threads, micro_batch=rows
        )
        for name, rows in MICRO_BATCH.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=6, help="blocks of each side")
    parser.add_argument("--only", nargs="+", default=list(CONFIGURATIONS), choices=list(CONFIGURATIONS))
    parser.add_argument("--learning", type=int, nargs="?", const=120, default=0, help="accuracy over so many steps")
    arguments = parser.parse_args()
    if not PYTHON.exists():
        sys.exit(f"there is no {PYTHON}: make against-trl installs TRL there")
    with tempfile.TemporaryDirectory(prefix="against-trl-") as directory:
        base = Settings(directory=directory, socket="", ranks=1, threads=2, steps=400, micro_batch=PROMPTS * SAMPLES)
        prepare = [str(PYTHON), str(PARTS / "against_trl_peer.py"), "--prepare", json.dumps(dataclasses.asdict(base))]
        subprocess.run(prepare, check=True, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
        if arguments.learning:
            learning(base, arguments.learning)
        else:
            speed(base, arguments.only, arguments.steps, arguments.rounds)


if __name__ == "__main__":
    main()
