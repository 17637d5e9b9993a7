"""Compare a training step through the controller with a plain Megatron loop under torchrun: time and memory.

    python benchmarks/train_step.py [--hidden 1024] [--layers 8] [--sequence 8] [--rounds 16] [--steps 1]
    python benchmarks/parts/train_step_gpu.py      (on a GPU, with 1.7B parameters and without the controller)

Both sides train the same model on the same batches on 8 CPU ranks (TP2 x PP2 x DP2), one thread each, with the same
products of matrices and the same settings of the allocator; if their losses or gradient norms differ, no figure is
printed. The rounds alternate, and the side that waits sleeps. Both have the same share of the processors: by default
Ray starts its workers at niceness 15, and torchrun starts each rank in a separate session, among which Linux divides
the processors first. A step through the controller includes sending the batch and receiving the metrics.

Memory is the peak that the kernel records for each process since its start (VmHWM), with Python, the libraries and Ray.
A page that several processes share counts in each by its part (Rss - Pss is subtracted): those of files, and those of a
rank forked from a process that has imported the libraries. Fragmentation of the heap at its peak varies by 10 to 30 MB
between ranks, so the mean of the ranks is compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
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

from benchmarks.parts.train_step_plain import MICRO_BATCH, OPTIM, PARALLEL, ROWS, WAIT, WORLD_SIZE, batch_of, model_of
from mcontroller import DataProto, Dispatch, MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool, register
from workers import ActorConfig, ActorRolloutRefWorker, ModelConfig, RolloutConfig

AT_MOST = 1.05
TOLERANCE = 1e-5
"""The largest difference of losses and of gradient norms."""
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
"""Settings of glibc for both sides: worker processes otherwise choose these by themselves."""

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
    """Mean seconds of a step, and the loss and the gradient norm of every step."""

    seconds: float
    losses: list[float]
    norms: list[float]


class Memory(NamedTuple):
    """Peaks of the ranks in MB: the mean and the largest, and the largest that counts shared pages in each process."""

    mean: float
    largest: float
    resident: float


class Plain:
    """The ranks started by torchrun, which run the rounds that are written to the store."""

    def __init__(self, model: ModelConfig) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, timeout=WAIT, wait_for_workers=False)
        sizes = {"hidden": model.hidden_size, "layers": model.num_layers, "sequence": model.max_sequence_length}
        options = [f"--{name}={value}" for name, value in {"port": self.store.port, **sizes}.items()]
        torchrun = [sys.executable, "-c", TORCHRUN, "--standalone", f"--nproc_per_node={WORLD_SIZE}"]
        script = str(Path(__file__).parent / "parts" / "train_step_plain.py")
        errors, name = tempfile.mkstemp()  # warnings of eight ranks, and why one of them ended
        self.errors = Path(name)
        self.process = subprocess.Popen([*torchrun, script, *options], stderr=errors)
        os.close(errors)
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
        self.errors.unlink()

    def _answers(self, key: str) -> list[bytes]:
        """Wait until every rank has answered, and return the answers."""
        keys = [f"{key}/{rank}" for rank in range(WORLD_SIZE)]
        while not self.store.check(keys):
            if self.process.poll() is not None:
                last = self.errors.read_text().strip()[-2000:]
                raise SystemExit(f"{last}\nthe plain loop ended with status {self.process.returncode}")
            time.sleep(0.05)
        return [self.store.get(key) for key in keys]


class Trainer(ActorRolloutRefWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process_id(self) -> int:
        return os.getpid()


def config_of(model: ModelConfig) -> ActorConfig:
    """Return the configuration of an actor that computes what the plain loop computes."""
    half = model.max_sequence_length // 2
    return ActorConfig(
        model=model,
        parallel=PARALLEL,
        optim=OPTIM,
        rollout=RolloutConfig(prompt_length=half, response_length=half),
        ppo_micro_batch_size=MICRO_BATCH,
        share_prompts=False,  # the plain loop computes whole rows
    )


class Controlled:
    """The same steps through a worker group."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self.pool = RayResourcePool([WORLD_SIZE], use_gpu=False)
        worker = RayClassWithInitArgs(Trainer, config_of(model), "actor")
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
    peaks, resident = [], []
    for pid in pids:
        texts = [Path(f"/proc/{pid}/{name}").read_text() for name in ("status", "smaps_rollup")]
        fields = (line.split() for text in texts for line in text.splitlines() if line.endswith("kB"))
        sizes = {name.rstrip(":"): int(kib) * 1024 / 1e6 for name, kib, _ in fields}
        peaks.append(sizes["VmHWM"] - sizes["Rss"] + sizes["Pss"])
        resident.append(sizes["VmHWM"])
    return Memory(statistics.mean(peaks), max(peaks), max(resident))


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the CPU seconds of these processes so far, which other load on the machine hardly changes."""
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
    """Run both sides alternately, each first in every other round; the first round warms up and is not measured."""
    with both_sides(model) as sides:
        imported = [peak_memory(side.pids) for side in sides]
        for side in sides:
            side.build()
        measured: list[list[Round]] = [[], []]
        computed: list[list[float]] = [[], []]
        for number in range(rounds + 1):
            for which in ((0, 1), (1, 0))[number % 2]:
                before = cpu_seconds(sides[which].pids)
                measured[which].append(sides[which].run(range(number * steps, (number + 1) * steps)))
                computed[which].append((cpu_seconds(sides[which].pids) - before) / steps)
            console.print(
                f"round {number}: " + ", ".join(f"{made[-1].seconds:.3f}" for made in measured) + " s per step"
            )
        peaks = [peak_memory(side.pids) for side in sides]
    differences = {name: largest_difference(*measured, name) for name in ("losses", "norms")}
    if max(differences.values()) > TOLERANCE:
        raise SystemExit(f"the sides do not train the same: largest differences {differences}, at most {TOLERANCE:.0e}")
    table = Table(title="Training step: time and memory", title_justify="left")
    for head in ("", "plain", "controller", "ratio", "limit", ""):
        table.add_column(head, justify="right" if head else "left")
    seconds = [[made.seconds for made in side[1:]] for side in measured]
    add(table, f"seconds per step, median of {rounds} rounds", [statistics.median(side) for side in seconds], 3)
    add(table, "  fastest round", [min(side) for side in seconds], 3, limited=False)
    add(table, "  slowest round", [max(side) for side in seconds], 3, limited=False)
    pairs = [other / one for one, other in zip(*seconds, strict=True)]
    table.add_row("  median of the ratios of single rounds", "", "", f"{statistics.median(pairs):.3f}x")
    used = [statistics.median(side[1:]) for side in computed]
    add(table, "CPU seconds per step, all ranks", used, 3, limited=False)
    add(table, "peak memory of a rank, MB, mean", [peak.mean for peak in peaks])
    add(table, "  largest of all ranks", [peak.largest for peak in peaks], limited=False)
    add(table, "  largest, with shared pages in each", [peak.resident for peak in peaks], limited=False)
    add(table, "  before the model is built, mean", [start.mean for start in imported], limited=False)
    added = [peak.mean - start.mean for peak, start in zip(peaks, imported, strict=True)]
    # What a rank shared at its start and has written since is added too: no limit
    add(table, "  added by model and training, mean", added, limited=False)
    for name, difference in differences.items():
        last = [f"{getattr(side[-1], name)[-1]:.7f}" for side in measured]
        table.add_row(f"{name}: of the last step; largest difference in all", *last, f"{difference:.1e}", "1e-5", "ok")
    return table


def largest_difference(plain: Sequence[Round], controlled: Sequence[Round], name: str) -> float:
    """Return the largest difference of ``losses`` or ``norms`` in all rounds."""
    values = zip(
        *([value for made in side for value in getattr(made, name)] for side in (plain, controlled)), strict=True
    )
    return max(abs(one - other) for one, other in values)


def add(table: Table, what: str, figures: Sequence[float], digits: int = 0, *, limited: bool = True) -> None:
    plain, controlled = figures
    ratio = controlled / plain
    limit = (f"{AT_MOST}x", "ok" if ratio <= AT_MOST else "MISSED") if limited else ("", "")
    table.add_row(what, f"{plain:.{digits}f}", f"{controlled:.{digits}f}", f"{ratio:.3f}x", *limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size of the model (a multiple of 16)")
    parser.add_argument("--layers", type=int, default=8, help="an even number")
    parser.add_argument("--sequence", type=int, default=8, help="tokens per row")
    parser.add_argument("--rounds", type=int, default=16, help="rounds of each side, after one to warm up")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps per round")
    options = parser.parse_args()
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RAY_worker_niceness": str(os.nice(0)),
    } | ALLOCATOR
    model = model_of(options.hidden, options.layers, options.sequence)
    console = Console(width=120, highlight=False)
    console.print(
        f"hidden {model.hidden_size}, {model.num_layers} layers, vocabulary {model.vocab_size}, float32; "
        f"{ROWS} rows of {model.max_sequence_length} tokens, micro-batches of {MICRO_BATCH}; TP2 x PP2 x DP2; "
        f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the start"
    )
    console.print(compare(model, options.rounds, options.steps, console))


if __name__ == "__main__":
    main()
