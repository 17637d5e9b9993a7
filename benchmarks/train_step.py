"""A training step through the controller beside a plain Megatron loop under torchrun: its time, and a rank's memory.

    python benchmarks/train_step.py [--hidden 1024] [--layers 8] [--sequence 8] [--rounds 16] [--steps 1]

Both sides train the same model on the same batches on 8 CPU ranks (TP2 x PP2 x DP2), one thread each, and take turns
round by round; the one that waits sleeps. Both get the same share of the processors: Ray would start its workers at
niceness 15, and torchrun each of its ranks in a session of its own, among which Linux divides processors first. A step
through the controller includes sending its batch and getting its metrics back. Memory is read from the kernel's record
of each process (VmHWM): the peak since its start, with Python, the libraries and Ray. A rank's own memory is that
without the pages of files, which all ranks of a machine share. Which holes a heap has at its peak is chance, worth 10
to 30 MB, so the mean of the ranks is compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import ray
from rich.console import Console
from rich.table import Table
from torch.distributed import TCPStore

from benchmarks.train_step_plain import MICRO_BATCH, OPTIM, PARALLEL, ROWS, WAIT, WORLD_SIZE, batch_of, model_of
from mcontroller import DataProto, Dispatch, MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool, register
from workers import ActorConfig, ActorRolloutRefWorker, ModelConfig, RolloutConfig

AT_MOST = 1.05
TOLERANCE = 1e-5

TORCHRUN = """
import subprocess
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

def in_this_session(*args, start_new_session=False, **options):
    return subprocess.Popen(*args, process_group=0, **options)

subprocess_handler.Popen = in_this_session
run.main()
"""


class Round(NamedTuple):
    """Mean seconds of a step, and of every step its loss and gradient norm."""

    seconds: float
    losses: list[float]
    norms: list[float]


class Memory(NamedTuple):
    """The ranks' peaks in MB: the mean of their own, the most of any, and the most with the pages of shared files."""

    own: float
    most: float
    resident: float


class Plain:
    """The ranks that torchrun started; they do what the store tells them."""

    def __init__(self, model: ModelConfig) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, timeout=WAIT, wait_for_workers=False)
        sizes = {"hidden": model.hidden_size, "layers": model.num_layers, "sequence": model.max_sequence_length}
        options = [f"--{name}={value}" for name, value in {"port": self.store.port, **sizes}.items()]
        torchrun = [sys.executable, "-c", TORCHRUN, "--standalone", f"--nproc_per_node={WORLD_SIZE}"]
        script = str(Path(__file__).with_name("train_step_plain.py"))
        self.process = subprocess.Popen([*torchrun, script, *options], stderr=subprocess.DEVNULL)
        self.pids = [int(answer) for answer in self._answers("ready")]
        self.rounds = 0

    def build(self) -> None:
        self.store.set("build", "")
        self._answers("built")

    def run(self, steps: Sequence[int]) -> Round:
        self.store.set(f"round/{self.rounds}", json.dumps(list(steps)))
        answers = [json.loads(answer) for answer in self._answers(f"made/{self.rounds}")]
        self.rounds += 1
        losses, norms = zip(*answers[-1][1], strict=True)  # the last rank is on the last stage
        return Round(max(seconds for seconds, _ in answers) / len(steps), list(losses), list(norms))

    def close(self) -> None:
        self.store.set("build", "")
        self.store.set(f"round/{self.rounds}", "[]")
        self.process.wait()

    def _answers(self, key: str) -> list[bytes]:
        """What every rank answers, once all have."""
        keys = [f"{key}/{rank}" for rank in range(WORLD_SIZE)]
        while not self.store.check(keys):
            if self.process.poll() is not None:
                raise SystemExit(f"the plain loop ended with status {self.process.returncode}")
            time.sleep(0.05)
        return [self.store.get(key) for key in keys]


class Trainer(ActorRolloutRefWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process_id(self) -> int:
        return os.getpid()


class Controlled:
    """The same steps through a worker group."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        half = model.max_sequence_length // 2
        config = ActorConfig(
            model=model,
            parallel=PARALLEL,
            optim=OPTIM,
            rollout=RolloutConfig(prompt_length=half, response_length=half),
            ppo_micro_batch_size=MICRO_BATCH,
        )
        self.pool = RayResourcePool([WORLD_SIZE], use_gpu=False)
        worker = RayClassWithInitArgs(Trainer, config, "actor")
        self.group: Any = MegatronRayWorkerGroup(self.pool, worker, name_prefix="trainer")
        self.pids = self.group.process_id()

    def build(self) -> None:
        self.group.init_model()

    def run(self, steps: Sequence[int]) -> Round:
        batches = [DataProto.from_dict(batch_of(step, self.model)) for step in steps]
        began = time.perf_counter()
        reports = [self.group.update_sft(batch).meta_info["metrics"] for batch in batches]
        seconds = (time.perf_counter() - began) / len(steps)
        losses, norms = ([report[f"sft/{name}"][0] for report in reports] for name in ("loss", "grad_norm"))
        return Round(seconds, losses, norms)

    def close(self) -> None:
        self.group.shutdown()
        self.pool.shutdown()


def peak_memory(pids: Sequence[int]) -> Memory:
    own, resident = [], []
    for pid in pids:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        peak, files, shared = (int(fields[name].split()[0]) * 1024 / 1e6 for name in ("VmHWM", "RssFile", "RssShmem"))
        own.append(peak - files - shared)
        resident.append(peak)
    return Memory(statistics.mean(own), max(own), max(resident))


def cpu_seconds(pids: Sequence[int]) -> float:
    """What these processes have computed so far; unlike elapsed time, other programs on the machine hardly move it."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


@contextlib.contextmanager
def both_sides(model: ModelConfig) -> Iterator[tuple[Plain, Controlled]]:
    ray.init(
        address="local",
        num_cpus=WORLD_SIZE,
        object_store_memory=200_000_000,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        with contextlib.closing(Plain(model)) as plain, contextlib.closing(Controlled(model)) as controlled:
            yield plain, controlled
    finally:
        ray.shutdown()


def compare(model: ModelConfig, rounds: int, steps: int, console: Console) -> Table:
    """Both sides in turn, each the first of every other round; the first round warms up and is not timed."""
    with both_sides(model) as sides:
        imported = [peak_memory(side.pids) for side in sides]
        for side in sides:
            side.build()
        turns: list[list[Round]] = [[], []]
        computed: list[list[float]] = [[], []]
        for turn in range(rounds + 1):
            for which in ((0, 1), (1, 0))[turn % 2]:
                before = cpu_seconds(sides[which].pids)
                turns[which].append(sides[which].run(range(turn * steps, (turn + 1) * steps)))
                computed[which].append((cpu_seconds(sides[which].pids) - before) / steps)
            console.print(f"round {turn}: " + ", ".join(f"{made[-1].seconds:.3f}" for made in turns) + " s a step")
        peaks = [peak_memory(side.pids) for side in sides]
    table = Table(title="A training step and its ranks", title_justify="left")
    for head in ("", "plain", "controller", "ratio", "at most", ""):
        table.add_column(head, justify="right" if head else "left")
    seconds = [[made.seconds for made in side[1:]] for side in turns]
    add(table, f"seconds of a step, median of {rounds} rounds", [statistics.median(side) for side in seconds], 3)
    add(table, "  fastest round", [min(side) for side in seconds], 3, limited=False)
    add(table, "  slowest round", [max(side) for side in seconds], 3, limited=False)
    pairs = [other / one for one, other in zip(*seconds, strict=True)]
    table.add_row("  median of the rounds' own ratios", "", "", f"{statistics.median(pairs):.3f}x")
    used = [statistics.median(side[1:]) for side in computed]
    add(table, "CPU seconds of a step, all ranks", used, 3, limited=False)
    add(table, "peak memory of a rank, its own, MB, mean", [peak.own for peak in peaks])
    add(table, "  of the rank that has the most", [peak.most for peak in peaks], limited=False)
    add(table, "  of that, with the pages of files", [peak.resident for peak in peaks], limited=False)
    add(table, "  before the model was built, mean", [start.own for start in imported], limited=False)
    added = [peak.own - start.own for peak, start in zip(peaks, imported, strict=True)]
    add(table, "  what model and training added, mean", added)
    for name, what in (("losses", "loss"), ("norms", "gradient norm")):
        plain, controlled = ([value for made in side for value in getattr(made, name)] for side in turns)
        apart = max(abs(one - other) for one, other in zip(plain, controlled, strict=True))
        verdict = "ok" if apart <= TOLERANCE else "MISSED"
        last = (f"{plain[-1]:.7f}", f"{controlled[-1]:.7f}")
        table.add_row(f"{what} of step {len(plain)}; apart in all", *last, f"{apart:.1e}", f"{TOLERANCE:.0e}", verdict)
    return table


def add(table: Table, what: str, figures: Sequence[float], digits: int = 0, *, limited: bool = True) -> None:
    plain, controlled = figures
    ratio = controlled / plain
    limit = (f"{AT_MOST}x", "ok" if ratio <= AT_MOST else "MISSED") if limited else ("", "")
    table.add_row(what, f"{plain:.{digits}f}", f"{controlled:.{digits}f}", f"{ratio:.3f}x", *limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size of the model (a multiple of 16)")
    parser.add_argument("--layers", type=int, default=8, help="an even number")
    parser.add_argument("--sequence", type=int, default=8, help="tokens of a row")
    parser.add_argument("--rounds", type=int, default=16, help="turns of each side, after one to warm up")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps of a turn")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "RAY_worker_niceness": str(os.nice(0))}
    model = model_of(options.hidden, options.layers, options.sequence)
    console = Console(width=120, highlight=False)
    console.print(
        f"hidden {model.hidden_size}, {model.num_layers} layers, vocabulary {model.vocab_size}, float32; "
        f"{ROWS} rows of {model.max_sequence_length} tokens, micro-batches of {MICRO_BATCH}; TP2 x PP2 x DP2; "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before"
    )
    console.print(compare(model, options.rounds, options.steps, console))


if __name__ == "__main__":
    main()
