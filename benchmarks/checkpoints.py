"""Measure checkpoints of an actor on TP2 x PP2 x DP2: bytes, memory and seconds of saves and loads, by rank.

    python benchmarks/checkpoints.py [--hidden 512] [--layers 8] [--distributed] [--directory DIR]

Eight ranks are forked, one thread each. What every load restores must equal what was saved, bit by bit. The seconds of
a call are of the slowest rank, in the fastest round. Extra memory is the peak of the resident memory of a rank (VmHWM)
during the call, less the memory before it; for an asynchronous save, the files that stay in memory until they are
written are added, and for a save to memory nothing: the file is the other column. CPU seconds are of all ranks and of
the processes that write, in the round with the least; a process that writes counts in the call in which it ends.
"verify" is what a load adds to read and hash every file once before anything changes. The files are read from the cache
of the system, so storage that is slower than SHA-256 hides more of it.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from tests.forking import run_ranks
from tests.workers.roles import actor, experience, largest_difference, own_shard, weights
from workers.checkpoint.load import Checkpoint, load_checkpoint, open_checkpoint

PARALLEL = {"tp": 2, "pp": 2}
WORLD_SIZE, ROWS, ROUNDS = 8, 16, 3
MIB = 1 << 20


def memory(name: str) -> int:
    """Return a value of /proc/self/status in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measured(call: Callable[[], object]) -> tuple[float, int, float]:
    """Return the seconds of a collective call, the peak of the memory less the memory before, and CPU seconds."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, cpu, started = memory("VmRSS"), cpu_seconds(), time.perf_counter()
    call()
    return time.perf_counter() - started, memory("VmHWM") - before, cpu_seconds() - cpu


def measure(
    path: str, model: dict[str, Any], parallel: dict[str, int], rounds: int, distributed: bool
) -> dict[str, Any]:
    """Save and load in rounds.

    Returns:
        What one rank measured: (seconds, bytes, CPU seconds) by call and round, the bytes written, and the largest
        difference of the weights that were restored from those that were saved.
    """
    worker = actor(parallel, "actor", model=model, optim={"distributed_optimizer": distributed}, ppo_epochs=1)
    batch = own_shard(experience(ROWS), worker)
    worker.update_actor(batch)
    calls: dict[str, list[tuple[float, int, float]]] = {}
    difference = 0.0

    def add(name: str, call: Callable[[], object]) -> None:
        calls.setdefault(name, []).append(measured(call))

    for step in range(rounds):
        add("step", lambda: worker.update_actor(batch))
        saved = weights(worker)
        add("save", lambda step=step: worker.save_checkpoint(f"{path}/at_once", step, 1))
        add("asynchronous save", lambda step=step: worker.save_checkpoint(f"{path}/later", step, 1, asynchronous=True))
        add("step during the save", lambda: worker.update_actor(batch))
        add("wait for the save", worker.wait_for_checkpoint)
        file = f"/proc/self/fd/{os.memfd_create('state')}"
        add("save to memory", lambda file=file: worker.save_to_memory(file))
        in_memory = os.stat(file).st_size
        in_file = weights(worker)
        worker.update_actor(batch)
        add("load from memory", lambda file=file: worker.load_from_memory(file))
        difference = max(difference, largest_difference(weights(worker), in_file))
        os.close(int(file.rpartition("/")[2]))
        checkpoint = Path(path) / "at_once" / f"global_step_{step}"
        opened: list[Checkpoint] = []
        add("verify", lambda opened=opened, path=checkpoint: opened.append(open_checkpoint(path, 0)))
        add("load", lambda opened=opened: load_checkpoint(worker.state, opened[0]))
        difference = max(difference, largest_difference(weights(worker), saved))
    written = sum(file.stat().st_size for file in checkpoint.glob(f"__{dist.get_rank()}_*"))
    return {"rounds": calls, "written": written, "in memory": in_memory, "difference": difference}


def main() -> None:
    """Measure and print two tables: by rank, and by call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--distributed", action="store_true", help="with Megatron's distributed optimizer")
    parser.add_argument("--directory", default=None, help="the file system to measure; a temporary one by default")
    arguments = parser.parse_args()
    model = {
        "hidden_size": arguments.hidden,
        "ffn_hidden_size": 4 * arguments.hidden,
        "num_layers": arguments.layers,
        "num_attention_heads": 8,
        "num_query_groups": 8,
    }
    with tempfile.TemporaryDirectory(dir=arguments.directory) as path:
        options = (path, model, PARALLEL, ROUNDS, arguments.distributed)
        ranks = run_ranks(measure, WORLD_SIZE, *options, timeout_s=500)
    if difference := max(rank["difference"] for rank in ranks):
        sys.exit(f"a load restored weights that differ by up to {difference:.1e} from those that were saved")
    show(ranks)


def show(ranks: list[dict[str, Any]]) -> None:
    """Print bytes and memory by rank, then seconds by call, with their share of a step."""
    console = Console()
    calls = list(ranks[0]["rounds"])
    with_memory = [call for call in calls if "step" not in call and "wait" not in call]
    by_rank = Table("rank", "written MiB", "in memory MiB", *(f"{call}: extra MiB" for call in with_memory))
    for number, rank in enumerate(ranks):
        peaks = (
            max(extra for _, extra, _ in rank["rounds"][call]) + ("asynchronous" in call) * rank["written"]
            for call in with_memory
        )
        sizes = (f"{rank[size] / MIB:.1f}" for size in ("written", "in memory"))
        by_rank.add_row(str(number), *sizes, *(f"{peak / MIB:.0f}" for peak in peaks))
    console.print(by_rank)
    seconds = {
        call: min(max(rank["rounds"][call][number][0] for rank in ranks) for number in range(ROUNDS)) for call in calls
    }
    cpu = {
        call: min(sum(rank["rounds"][call][number][2] for rank in ranks) for number in range(ROUNDS)) for call in calls
    }
    by_call = Table("call", "seconds", "share of a step", "CPU seconds", "share of a step")
    for call in calls:
        shares = (f"{table[call]:.3f}" if table is seconds else f"{table[call]:.2f}" for table in (seconds, cpu))
        ratios = (f"{table[call] / table['step']:.0%}" for table in (seconds, cpu))
        by_call.add_row(call, *(cell for pair in zip(shares, ratios, strict=True) for cell in pair))
    console.print(by_call)
    console.print(f"a verified load takes {1 + seconds['verify'] / seconds['load']:.2f} times a plain load")


if __name__ == "__main__":
    main()
