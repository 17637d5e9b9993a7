"""Measure moving weights from an actor group to a rollout group on Ray, by every transport.

    python benchmarks/weights.py [--hidden 512] [--rounds 5]

Each transport is compared in the same run with what it cannot do without: the seconds of two copies of the same bytes
in one process (into a buffer and out of it), and of a bare send of the same bytes between two processes over gloo.
The memory of a rank is the growth of its resident set at the peak of a transfer; pages of shared memory count in every
process that maps them.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
import torch.distributed as dist

from mcontroller import Dispatch, MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool, register
from workers import ActorConfig, ActorRolloutRefWorker, load_config
from workers.weights.local_tensors import described_tensors
from workers.weights.transfer.weight_transfer import TransferReport, WeightTransfer

MIB = 1 << 20
BUCKET = 8 * MIB
TRANSPORTS = ("shared_memory", "process_group", "object_store")
MOVES: list[tuple[int, dict[str, int], int, dict[str, int]]] = [(1, {}, 1, {}), (2, {"tp": 2}, 1, {})]


class Measured(ActorRolloutRefWorker):
    """A policy that reports the memory of its process, and what copies and bare sends of its weights take."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_peak(self) -> None:
        """Reset the peak of the resident set."""
        Path("/proc/self/clear_refs").write_text("5")
        self.resident = psutil.Process().memory_info().rss

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def peak(self) -> int:
        """Return the bytes by which the resident set grew at its peak."""
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
        return peak - self.resident

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def two_copies(self, rounds: int) -> float:
        """Return the seconds of copying the weights into a buffer of one bucket and out of it, the least of rounds."""
        tensors = [tensor.data.view(-1).view(torch.uint8) for tensor in described_tensors(self.model, self.context)[0]]
        buffer = torch.zeros(BUCKET, dtype=torch.uint8)
        target = [torch.zeros_like(tensor) for tensor in tensors]
        seconds = []
        for _ in range(rounds):
            started = time.perf_counter()
            for source, destination in zip(tensors, target, strict=True):
                for start in range(0, len(source), BUCKET):
                    part = source[start : start + BUCKET]
                    buffer[: len(part)].copy_(part)
                    destination[start : start + BUCKET].copy_(buffer[: len(part)])
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def bare_send(self, port: int, rank: int, nbytes: int, rounds: int) -> float:
        """Return the seconds of sending or receiving so many bytes over gloo, the least of rounds."""
        timeout = datetime.timedelta(seconds=60)
        store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
        group = dist.ProcessGroupGloo(store, rank, 2, timeout)
        memory = torch.ones(nbytes, dtype=torch.uint8)  # as large as the weights: one bucket would stay in the cache
        seconds = []
        for _ in range(rounds):
            started = time.perf_counter()
            for start in range(0, nbytes, BUCKET):
                part = memory[start : start + BUCKET]
                (group.send if rank == 0 else group.recv)([part], 1 - rank, 0).wait()
            group.barrier().wait()
            seconds.append(time.perf_counter() - started)
        return min(seconds)


def group(pool: RayResourcePool, role: str, parallel: dict[str, int], hidden: int) -> Any:
    """Start a policy of this role."""
    model = {
        "vocab_size": 8_000,
        "max_sequence_length": 128,
        "num_layers": 8,
        "hidden_size": hidden,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "ffn_hidden_size": 2 * hidden,
    }
    common = {"model": model, "parallel": parallel, "ppo_mini_batch_size": 8, "ppo_micro_batch_size": 2}
    init = RayClassWithInitArgs(Measured, load_config(ActorConfig, common), role)
    started = MegatronRayWorkerGroup(pool, init, name_prefix=role)
    started.init_model()
    return started


def row(actor: Any, rollout: Any, transport: str, rounds: int) -> tuple[TransferReport, float]:
    """Return the fastest of the transfers, and the most memory that a rank needed for one, in buckets."""
    for each in (actor, rollout):
        each.start_peak()
    with WeightTransfer(actor, rollout, transport=transport, bucket_bytes=BUCKET) as transfer:
        reports = [transfer.run() for _ in range(rounds)]
        peak = max(max(each.peak()) for each in (actor, rollout))
    return min(reports, key=lambda report: report.seconds), peak / BUCKET


def measure(pools: tuple[RayResourcePool, RayResourcePool], move: Any, hidden: int, rounds: int) -> None:
    """Print the table of one move."""
    _, here, ranks, there = move
    with group(pools[0], "actor", here, hidden) as actor, group(pools[1], "rollout", there, hidden) as rollout:
        resident = psutil.Process().memory_info().rss
        rows = {transport: row(actor, rollout, transport, rounds) for transport in TRANSPORTS}
        grown = psutil.Process().memory_info().rss - resident
        copies = max(rollout.two_copies(rounds))
        nbytes = rows["process_group"][0].bytes_sent
        bare = float("nan")
        if (actor.world_size, ranks) == (1, 1):
            port = 20_000 + int(time.time()) % 10_000
            sending = actor.bare_send.options(blocking=False)(port, 0, nbytes, rounds)
            bare = max(rollout.bare_send(port, 1, nbytes, rounds) + sending.get())
    print(
        f"\n{here or 'one rank'} -> {there or 'one rank'}, {nbytes / MIB:.0f} MiB in buckets of {BUCKET / MIB:.0f} MiB"
    )
    print(f"two copies of the bytes {copies:.3f} s, bare gloo send {bare:.3f} s; controller grew {grown / MIB:.1f} MiB")
    columns = ("transport", "sent/least", "seconds", "/ two copies", "/ bare gloo", "buffers", "peak", "verify")
    print(f"{columns[0]:<15}" + "".join(f"{name:>14}" for name in columns[1:]))
    for transport, (report, peak) in rows.items():
        ratios = (report.bytes_sent / report.least_bytes, report.seconds, report.seconds / copies)
        more = (report.seconds / bare, report.buffer_bytes / BUCKET, peak)
        verified = report.verify_seconds or 0.0
        print(
            f"{transport:<15}"
            + "".join(f"{number:>14.3f}" for number in (*ratios, *more, verified / (verified + report.seconds)))
        )
    print(
        "buffers and peak: memory of a rank in addition to its weights, in buckets; verify: share of an update",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512, help="hidden size of the model (a multiple of 64)")
    parser.add_argument("--rounds", type=int, default=5, help="transfers by each transport; the fastest is reported")
    arguments = parser.parse_args()
    ray.init("local", num_cpus=8, object_store_memory=300_000_000, include_dashboard=False, log_to_driver=False)
    for move in MOVES:
        with (
            RayResourcePool([move[0]], use_gpu=False, name_prefix="actor") as training,
            RayResourcePool([move[2]], use_gpu=False, name_prefix="rollout") as generation,
        ):
            measure((training, generation), move, arguments.hidden, arguments.rounds)
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
