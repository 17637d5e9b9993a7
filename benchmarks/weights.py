"""Measure moving weights from an actor group to a rollout group on Ray, by every transport.

    python benchmarks/weights.py [--hidden 512] [--rounds 15]

Each transport is compared with what it cannot do without, measured in turns with it in the same run, so that another
load of the machine slows both. All are the fastest of the rounds, after one that is not counted:

- two copies: the same tensors into a buffer of one bucket and out of it, in the process of a rank;
- overlapped copies: the same bytes through two buckets of shared memory, copied in by one rank and out by the other at
  the same time, with one byte over a socket for each bucket;
- bare pieces, bare gloo: the same bytes between two ranks over gloo, in messages of a bucket, each after the one before
  was received; and in these or in one message, whichever is faster. Waiting for each message costs more than their
  number: as many that are started together take the time of one.

Every process computes with one thread. By default a pool uses as many threads as the node has cores, divided by the
ranks of one group: with two groups on a node, the threads of one then wait for cores that threads of the other hold,
and two copies in one process while the other is idle use cores that a transfer needs for its other side.

Seconds are of the slowest rank, from the start of its call until everything was sent or received, without the
comparison of fingerprints, which is the column verify. The memory of a rank is what its resident set grows by between
the construction of the transfer and the peak while it sends or receives. In the column peak, pages of shared memory
count in every process that maps them; the column own leaves them out.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
import mmap
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
import torch.distributed as dist

from mcontroller import Dispatch, MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool, register
from workers import ActorConfig, ActorRolloutRefWorker, load_config
from workers.weights.shards import model_shards
from workers.weights.transfer.endpoint import TransferOutcome
from workers.weights.transfer.weight_transfer import TransferReport, WeightTransfer

MIB = 1 << 20
BUCKET = 8 * MIB
TRANSPORTS = ("process_group",)
MOVES: list[tuple[int, dict[str, int], int, dict[str, int]]] = [(1, {}, 1, {}), (2, {"tp": 2}, 1, {})]


def _resident(line: str = "VmRSS") -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(each.split()[1]) << 10 for each in lines if each.startswith(line))


class Measured(ActorRolloutRefWorker):
    """A policy that reports the memory of its process, and what copies and bare sends of its weights take."""

    resident, shared_before, largest, largest_own = 0, 0, 0, 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_peak(self) -> None:
        """Measure the growth of the resident set from this call on."""
        self.resident, self.shared_before = _resident(), _resident("RssShmem")
        self.largest = self.largest_own = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def peak(self) -> tuple[int, int]:
        """Return the growth of the resident set at the peak of a transfer, and how many of its bytes are not shared."""
        return self.largest - self.resident, self.largest_own

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights(self, transfer: str, timeout: float) -> TransferOutcome:
        return self._measured(lambda: self.sender.send_weights(transfer, timeout))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def receive_weights(self, transfer: str, timeout: float) -> TransferOutcome:
        return self._measured(lambda: self.sender.receive_weights(transfer, timeout))

    def _measured(self, move: Callable[[], TransferOutcome]) -> TransferOutcome:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        outcome = move()
        peak, shared = _resident("VmHWM"), _resident("RssShmem") - self.shared_before
        self.largest = max(self.largest, peak)
        self.largest_own = max(self.largest_own, peak - self.resident - shared)
        return outcome

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def prepare_copies(self) -> None:
        """Allocate what the copies need."""
        self.mine = [shard.param.data.view(-1).view(torch.uint8) for shard in model_shards(self.model, self.context)]
        self.copied = [torch.zeros_like(tensor) for tensor in self.mine]
        self.bucket = torch.zeros(BUCKET, dtype=torch.uint8)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def two_copies(self) -> float:
        """Return the seconds of copying the weights into a buffer of one bucket and out of it."""
        started = time.perf_counter()
        for source, destination in zip(self.mine, self.copied, strict=True):
            for start in range(0, len(source), BUCKET):
                part = source[start : start + BUCKET]
                self.bucket[: len(part)].copy_(part)
                destination[start : start + BUCKET].copy_(self.bucket[: len(part)])
        return time.perf_counter() - started

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def prepare_pair(self, path: str, port: int, rank: int, nbytes: int) -> None:
        """Connect to the other rank of a pair: by shared memory with a socket at ``path``, and by gloo."""
        timeout = datetime.timedelta(seconds=60)
        store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
        self.pair, self.side = dist.ProcessGroupGloo(store, rank, 2, timeout), rank
        self.memory = torch.ones(nbytes, dtype=torch.uint8)  # as large as the weights: one bucket stays in the cache
        self.link = socket.socket(socket.AF_UNIX)
        if rank == 0:
            descriptor = os.memfd_create("copies")
            os.ftruncate(descriptor, 2 * BUCKET)
            listener, self.link = self.link, None
            listener.bind(path)
            listener.listen()
            self.pair.barrier().wait()
            self.link, _ = listener.accept()
            socket.send_fds(self.link, [b"x"], [descriptor])
        else:
            self.pair.barrier().wait()
            self.link.connect(path)
            _, (descriptor,), _, _ = socket.recv_fds(self.link, 1, 1)
        self.shared = torch.frombuffer(mmap.mmap(descriptor, 2 * BUCKET), dtype=torch.uint8)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def overlapped_copies(self) -> float:
        """Return the seconds of copying so many bytes into shared memory, or out of it."""
        self.pair.barrier().wait()
        started = time.perf_counter()
        for index, start in enumerate(range(0, len(self.memory), BUCKET)):
            part = self.memory[start : start + BUCKET]
            buffer = self.shared[index % 2 * BUCKET :][: len(part)]
            if self.side == 0:
                if index > 1:
                    self.link.recv(1)
                buffer.copy_(part)
            else:
                self.link.recv(1)
                part.copy_(buffer)
            self.link.send(b"x")
        for _ in range(2 if self.side == 0 else 0):
            self.link.recv(1)
        return time.perf_counter() - started

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


def both(actor: Any, rollout: Any, method: str, *args: Any) -> float:
    """Run one side of a method on each of two ranks; return the seconds of the slower one."""
    sending = getattr(actor, method).options(blocking=False)(*args)
    return float(max(getattr(rollout, method)(*args) + sending.get()))


def memory_of(actor: Any, rollout: Any, transport: str) -> tuple[float, float]:
    """Return the most memory that a rank needs for a transfer, and how much of it is not shared, in buckets."""
    found = []
    for _ in range(3):
        for each in (actor, rollout):
            each.start_peak()
        with WeightTransfer(actor, rollout, transport=transport, bucket_bytes=BUCKET) as transfer:
            transfer.run()  # once: the check after it leaves free memory in the process
            peaks = [*actor.peak(), *rollout.peak()]
        found.append((max(peak for peak, _ in peaks) / BUCKET, max(own for _, own in peaks) / BUCKET))
    return min(found)


class Least:
    """The least seconds of what a transfer cannot do without."""

    def __init__(self, actor: Any, rollout: Any, nbytes: int) -> None:
        self.actor, self.rollout, self.nbytes = actor, rollout, nbytes
        self.is_pair = actor.world_size == rollout.world_size == 1
        self.copies = math.inf
        self.overlapped = self.pieces = self.gloo = math.inf if self.is_pair else math.nan
        rollout.prepare_copies()
        if self.is_pair:
            path = os.path.join(tempfile.mkdtemp(prefix="copies-"), "socket")
            port = 20_000 + int(time.time()) % 10_000
            sending = actor.prepare_pair.options(blocking=False)(path, port, 0, nbytes)
            rollout.prepare_pair(path, port, 1, nbytes)
            sending.get()

    def measure(self) -> None:
        """Measure once."""
        self.copies = min(max(self.rollout.two_copies()), self.copies)
        if self.is_pair:
            self.overlapped = min(both(self.actor, self.rollout, "overlapped_copies"), self.overlapped)
            self.pieces = min(both(self.actor, self.rollout, "bare_send", BUCKET), self.pieces)
            self.gloo = min(both(self.actor, self.rollout, "bare_send", self.nbytes), self.pieces, self.gloo)


def measure(pools: tuple[RayResourcePool, RayResourcePool], move: Any, hidden: int, rounds: int) -> None:
    """Print the table of one move."""
    _, from_axes, _, to_axes = move
    with group(pools[0], "actor", from_axes, hidden) as actor, group(pools[1], "rollout", to_axes, hidden) as rollout:
        with WeightTransfer(actor, rollout, bucket_bytes=BUCKET) as transfer:
            transfer.run()  # loads what every transfer and its check need
        resident = psutil.Process().memory_info().rss
        peaks = {transport: memory_of(actor, rollout, transport) for transport in TRANSPORTS}
        with contextlib.ExitStack() as stack:
            transfers = {
                name: stack.enter_context(WeightTransfer(actor, rollout, transport=name, bucket_bytes=BUCKET))
                for name in TRANSPORTS
            }
            reports: dict[str, list[TransferReport]] = {name: [each.run()] for name, each in transfers.items()}
            grown = psutil.Process().memory_info().rss - resident
            nbytes = reports[TRANSPORTS[0]][0].bytes_sent
            least = Least(actor, rollout, nbytes)
            for _ in range(rounds):
                least.measure()
                for name, each in transfers.items():
                    reports[name].append(each.run())
    print(
        f"\n{from_axes or 'one rank'} -> {to_axes or 'one rank'}, {nbytes / MIB:.0f} MiB in buckets of "
        f"{BUCKET / MIB:.0f} MiB"
    )
    print(
        f"two copies {least.copies:.4f} s, overlapped copies {least.overlapped:.4f} s, "
        f"bare pieces {least.pieces:.4f} s, bare gloo {least.gloo:.4f} s; controller grew {grown / MIB:.1f} MiB"
    )
    columns = (
        "sent/least",
        "seconds",
        "/ two copies",
        "/ overlapped",
        "/ bare pieces",
        "/ bare gloo",
        "buffers",
        "peak",
        "own",
        "verify",
    )
    print(f"{'transport':<15}" + "".join(f"{name:>14}" for name in columns))
    for name, found in reports.items():
        report = min(found[1:], key=lambda each: each.seconds)
        verified = min(each.verify_seconds or 0.0 for each in found[1:])
        seconds = report.seconds
        numbers = (
            report.bytes_sent / report.least_bytes,
            seconds,
            *(seconds / each for each in (least.copies, least.overlapped, least.pieces, least.gloo)),
            report.buffer_bytes / BUCKET,
            *peaks[name],
            verified,
        )
        print(f"{name:<15}" + "".join(f"{number:>14.3f}" for number in numbers))
    print(
        "buffers, peak, own: memory of a rank in addition to its weights, in buckets; verify: seconds of the check",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512, help="hidden size of the model (a multiple of 64)")
    parser.add_argument("--rounds", type=int, default=15, help="transfers by each transport; the fastest is reported")
    arguments = parser.parse_args()
    ray.init("local", num_cpus=8, object_store_memory=300_000_000, include_dashboard=False, log_to_driver=False)
    for move in MOVES:
        with (
            RayResourcePool([move[0]], use_gpu=False, name_prefix="actor", threads=1) as training,
            RayResourcePool([move[2]], use_gpu=False, name_prefix="rollout", threads=1) as generation,
        ):
            measure((training, generation), move, arguments.hidden, arguments.rounds)
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
