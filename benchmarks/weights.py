"""Measure moving weights from an actor group to a rollout group on Ray, over gloo.

    python benchmarks/weights.py [--hidden 512] [--rounds 15]

A transfer must send no more bytes than the target has, and keep at most two buckets on a rank. Its seconds are compared
with what it cannot do without, measured in turns with it, so that other load on the machine slows all. All are the
fastest of the rounds, after one that is not counted:

- two copies: the same tensors into a buffer of one bucket and out of it, in the process of a rank;
- bare gloo: the same bytes between two ranks over gloo, in messages of a bucket, or in one message if that is faster.

Every process computes with one thread: with two groups on a node, the threads of one otherwise wait for cores that
threads of the other hold. Seconds are of the slowest rank, from the start of its call until everything was sent or
received, without the comparison of fingerprints, which is the column verify.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ray
import torch
import torch.distributed as dist

from mcontroller import Dispatch, MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool, register
from workers import ActorConfig, ActorRolloutRefWorker, load_config
from workers.weights.shards import model_shards
from workers.weights.transfer.weight_transfer import TransferReport, WeightTransfer

MIB = 1 << 20
BUCKET = 8 * MIB
MOVES: list[tuple[dict[str, int], dict[str, int]]] = [({}, {}), ({"tp": 2}, {})]
"""The layouts of actor and rollout, of as many ranks as their axes need."""


class Measured(ActorRolloutRefWorker):
    """A policy that reports what copies and bare sends of its weights take."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_bytes(self) -> int:
        """Return the bytes of this rank's weights."""
        return sum(shard.param.nbytes for shard in model_shards(self.model, self.context))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def two_copies(self) -> float:
        """Return the seconds of copying the weights into a buffer of one bucket and out of it."""
        sources = [shard.param.data.view(-1).view(torch.uint8) for shard in model_shards(self.model, self.context)]
        copies = [torch.zeros_like(source) for source in sources]
        bucket = torch.zeros(BUCKET, dtype=torch.uint8)
        started = time.perf_counter()
        for source, copy in zip(sources, copies, strict=True):
            for start in range(0, len(source), BUCKET):
                part = source[start : start + BUCKET]
                bucket[: len(part)].copy_(part)
                copy[start : start + BUCKET].copy_(bucket[: len(part)])
        return time.perf_counter() - started

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def connect_pair(self, port: int, side: int, nbytes: int) -> None:
        """Connect to the other rank of a pair by gloo."""
        timeout = datetime.timedelta(seconds=60)
        store = dist.TCPStore("127.0.0.1", port, is_master=side == 0, timeout=timeout, wait_for_workers=False)
        self.pair, self.side = dist.ProcessGroupGloo(store, side, 2, timeout), side
        self.memory = torch.ones(nbytes, dtype=torch.uint8)  # as large as the weights: one bucket stays in the cache

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def bare_send(self, piece: int) -> float:
        """Return the seconds of sending or receiving the bytes over gloo, so many in a message."""
        self.pair.barrier().wait()
        started = time.perf_counter()
        for start in range(0, len(self.memory), piece):
            part = self.memory[start : start + piece]
            (self.pair.send if self.side == 0 else self.pair.recv)([part], 1 - self.side, 0).wait()
        self.pair.barrier().wait()
        return time.perf_counter() - started


@contextlib.contextmanager
def policy(role: str, parallel: dict[str, int], hidden: int) -> Iterator[Any]:
    """Start a policy of this role, in a pool of its own."""
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
    with (
        RayResourcePool([math.prod(parallel.values())], use_gpu=False, name_prefix=role, threads=1) as pool,
        MegatronRayWorkerGroup(pool, init, name_prefix=role) as group,
    ):
        group.init_model()
        yield group


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def both(actor: Any, rollout: Any, method: str, *args: Any) -> float:
    """Run one side of a method on each of two ranks; return the seconds of the slower one."""
    sending = getattr(actor, method).options(blocking=False)(*args)
    return float(max(getattr(rollout, method)(*args) + sending.get()))


def measure(
    from_axes: dict[str, int], to_axes: dict[str, int], hidden: int, rounds: int
) -> tuple[list[TransferReport], int]:
    """Print the figures of one move, and return the reports of its transfers, and the bytes that the target has."""
    copies, gloo = [], []
    with (
        policy("actor", from_axes, hidden) as actor,
        policy("rollout", to_axes, hidden) as rollout,
        WeightTransfer(actor, rollout, transport="process_group", bucket_bytes=BUCKET) as transfer,
    ):
        reports, held = [transfer.run()], sum(rollout.weight_bytes())
        nbytes = reports[0].bytes_sent
        is_pair = actor.world_size == rollout.world_size == 1
        if is_pair:
            port = free_port()
            sending = actor.connect_pair.options(blocking=False)(port, 0, nbytes)
            rollout.connect_pair(port, 1, nbytes)
            sending.get()
        for _ in range(rounds):
            copies.append(max(rollout.two_copies()))
            if is_pair:
                gloo += [both(actor, rollout, "bare_send", piece) for piece in (BUCKET, nbytes)]
            reports.append(transfer.run())
    fastest = min(reports[1:], key=lambda report: report.seconds)
    print(f"{from_axes or 'one rank'} -> {to_axes or 'one rank'}, {nbytes / MIB:.0f} MiB in {BUCKET / MIB:.0f} MiB")
    print(f"  sent / bytes of the target {nbytes / held:.3f}  buffers {buckets(fastest):.2f} buckets")
    print(f"  {fastest.seconds:.4f} s, {fastest.seconds / min(copies):.2f} of two copies", end="")
    print(f", {fastest.seconds / min(gloo):.2f} of bare gloo" if gloo else "", end="")
    print(f"; verify {min(report.verify_seconds or 0.0 for report in reports[1:]):.4f} s", flush=True)
    return reports, held


def buckets(report: TransferReport) -> float:
    """Return the memory that a rank keeps for a transfer, in buckets."""
    return report.buffer_bytes / BUCKET


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512, help="hidden size of the model (a multiple of 64)")
    parser.add_argument("--rounds", type=int, default=15, help="transfers; the fastest is reported")
    arguments = parser.parse_args()
    ray.init("local", num_cpus=8, object_store_memory=300_000_000, include_dashboard=False, log_to_driver=False)
    measured = [measure(*move, arguments.hidden, arguments.rounds) for move in MOVES]
    ray.shutdown()
    fits = (report.bytes_sent <= held and buckets(report) <= 2 for reports, held in measured for report in reports)
    return 0 if all(fits) else 1


if __name__ == "__main__":
    sys.exit(main())
