"""Round trips of a batch through 8 worker processes (TP2 x PP2 x DP2), beside bare Ray.

    python benchmarks/roundtrip.py [--megabytes 0.2 15 120] [--repeats 20]

Bare Ray is the minimum of correct hand-written code: one put per shard, one task per rank, one get of the ranks that
return. Both must return equal columns. Both write a batch of 120 MB into the store; a call whose part of the store this
process has not touched before takes 28,600 page faults and 50 to 100 ms longer, in both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import psutil
import ray
import torch

from mcontroller import (
    DataProto,
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    WorkerError,
    register,
)
from parallel_state import ParallelLayout, Topology

LAYOUT = ParallelLayout(8, tp=2, pp=2)
SEQUENCE = 1024
STEP_SECONDS, STEP_MEGABYTES = 0.2, 0.2
STEPS_IN_A_ROW = 10
SETTLE_SECONDS = 0.1
LIMITS = {0.2: 0.5, 15: 1.05, 120: 1.05}
"""Limits of our time over bare Ray's, by megabytes."""
EMPTY_LIMIT = 0.25
START_LIMIT = 1.3
FAILURE_SECONDS = 1.0


class Ours(Worker):
    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def column(self, batch: DataProto) -> DataProto:
        return batch.select(batch_keys=["score"])

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def metrics(self, batch: DataProto) -> DataProto:
        return DataProto(meta_info={"metrics": {"rows": len(batch)}})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def empty(self) -> None:
        return None

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def forward_backward(self, batch: DataProto) -> DataProto:
        time.sleep(STEP_SECONDS / 2)
        return DataProto(meta_info={"metrics": {"loss": 1.0}})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def optim_step(self) -> float:
        time.sleep(STEP_SECONDS / 2)
        return 1.0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_on(self, rank: int) -> None:
        """Raise on one rank; the others wait, as in a collective."""
        if self.rank == rank:
            raise ValueError("out of memory")
        threading.Event().wait()


@ray.remote(num_cpus=1)
class Bare:
    def column(self, shard: dict[str, np.ndarray], collected: bool) -> Any:
        return shard["score"] if collected else None

    def metrics(self, shard: dict[str, np.ndarray], collected: bool) -> Any:
        return {"rows": len(shard["score"])} if collected else None

    def empty(self) -> None:
        return None


class BareRay:
    """The same work as ``Ours``, written by hand for a layout."""

    def __init__(self, layout: ParallelLayout) -> None:
        topology = Topology.from_layout(layout)
        self.shards = layout.dp
        self.shard_of = topology.shard_indices(("dp",))
        self.collected = topology.select(tp=0, pp=-1)
        self.actors = [Bare.remote() for _ in range(layout.world_size)]  # type: ignore[attr-defined]
        ray.get([actor.empty.remote() for actor in self.actors])

    def call(self, method: str, batch: DataProto) -> list[Any]:
        columns = {name: tensor.numpy() for name, tensor in batch.batch.items()}
        rows = len(batch) // self.shards
        shards = [
            ray.put({name: array[part * rows : (part + 1) * rows] for name, array in columns.items()})
            for part in range(self.shards)
        ]
        refs = [
            getattr(actor, method).remote(shards[self.shard_of[rank]], rank in self.collected)
            for rank, actor in enumerate(self.actors)
        ]
        values = ray.get(refs)
        return [values[rank] for rank in self.collected]

    def column(self, batch: DataProto) -> np.ndarray:
        return np.concatenate(self.call("column", batch))

    def metrics(self, batch: DataProto) -> list[Any]:
        return self.call("metrics", batch)

    def empty(self) -> None:
        ray.get([actor.empty.remote() for actor in self.actors])

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)


class Importing(Worker):
    def __init__(self, code: str) -> None:
        exec(code)


@ray.remote(num_cpus=1)
class BareImporting:
    def __init__(self, code: str) -> None:
        exec(code)

    def ready(self) -> None:
        return None


def group_of(layout: ParallelLayout, pool: RayResourcePool) -> Any:
    """Start ``Ours`` in a layout."""
    worker = RayClassWithInitArgs(Ours)
    return RayWorkerGroup(pool, worker, name_prefix="ours", topology=Topology.from_layout(layout))


def make_batch(megabytes: float) -> DataProto:
    rows = max(2, round(megabytes * 1e6 / (SEQUENCE * 28)) // 2 * 2)
    ids = {name: torch.randint(0, 100, (rows, SEQUENCE)) for name in ("input_ids", "attention_mask", "position_ids")}
    return DataProto.from_dict({**ids, "score": torch.rand(rows, SEQUENCE)})


def same_columns(group: Any, bare: BareRay, batch: DataProto) -> bool:
    """Return whether both ways return the same column of a batch."""
    return np.array_equal(group.column(batch).batch["score"].numpy(), bare.column(batch))


def interleaved(runs: dict[str, Callable[[], Any]], repeats: int, *, in_a_row: int = 1) -> dict[str, float]:
    """Return the median seconds by name, measured alternately so that other load on the machine slows all of them.

    With ``in_a_row``, each runs so often before the next one does, after a pause: what one leaves to background threads
    is not counted in the other.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 2):
        for name, run in runs.items():
            if in_a_row > 1:
                time.sleep(SETTLE_SECONDS)
            for _ in range(in_a_row):
                began = time.perf_counter()
                run()
                if repeat >= 2:
                    times[name].append(time.perf_counter() - began)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def peak_memory(run: Callable[[], Any]) -> int:
    """Return the bytes by which ``run`` raises the private memory of this process at its peak.

    The pages of Ray's store belong to the node. A process that maps an object twice has them twice in its RSS.
    """
    process, stop = psutil.Process(), threading.Event()

    def private() -> int:
        memory = process.memory_info()
        return int(memory.rss - memory.shared)

    before = private()
    samples = [before]

    def sample() -> None:
        while not stop.wait(0.001):
            samples.append(private())

    sampler = threading.Thread(target=sample)
    sampler.start()
    run()
    stop.set()
    sampler.join()
    return max(samples) - before


def report_calls(group: Any, bare: BareRay, megabytes: float, repeats: int) -> None:
    """Report calls with a batch that return a column, and calls that return metrics."""
    batch = make_batch(megabytes)
    if not same_columns(group, bare, batch):
        sys.exit(f"a call with {megabytes:g} MB returns another column than bare Ray")
    for method, what in (("column", "batch in, a column out"), ("metrics", "batch in, metrics out")):
        ours, theirs = getattr(group, method), getattr(bare, method)
        runs = {"ours": lambda ours=ours: ours(batch), "bare": lambda theirs=theirs: theirs(batch)}
        limit = LIMITS.get(megabytes, max(LIMITS.values()))
        report(f"{megabytes:g} MB: {what}", interleaved(runs, repeats), limit)


def report_step(group: Any, repeats: int) -> None:
    """Report what two calls add to a training step, whose work is a sleep that needs no core.

    A program may wait for both one after the other, send both and then wait, or read the results of a step while the
    next one runs.
    """
    batch = make_batch(STEP_MEGABYTES)

    def alone() -> None:
        time.sleep(STEP_SECONDS / 2)
        time.sleep(STEP_SECONDS / 2)

    def waited() -> None:
        group.forward_backward(batch)
        group.optim_step()

    def send() -> list[Any]:
        loss = group.forward_backward.options(blocking=False)(batch)
        return [loss, group.optim_step.options(blocking=False)()]

    def sent() -> None:
        for future in send():
            future.get()

    def alone_in_a_row() -> None:
        for _ in range(STEPS_IN_A_ROW):
            alone()

    def read_late() -> None:
        before: list[Any] = []
        for _ in range(STEPS_IN_A_ROW):
            futures = send()
            for future in before:
                future.get()
            before = futures
        for future in before:
            future.get()

    times = interleaved({"alone": alone, "waited": waited, "sent": sent}, repeats)
    rows = {
        "wait for each": times["waited"] - times["alone"],
        "send both, then wait": times["sent"] - times["alone"],
    }
    times = interleaved({"alone": alone_in_a_row, "late": read_late}, max(3, repeats // STEPS_IN_A_ROW))
    rows["read each step while the next runs"] = (times["late"] - times["alone"]) / STEPS_IN_A_ROW
    print(f"added to a step of {STEP_SECONDS:g} s by forward_backward, with {STEP_MEGABYTES:g} MB, and by optim_step:")
    for what, seconds in rows.items():
        print(f"  {what:<48} {seconds * 1e3:>6.2f} ms {seconds / STEP_SECONDS:>6.1%}")


def report_failure(group: Any) -> None:
    """Report how long after a rank raised the controller has its error, while the other ranks wait for it."""
    try:
        group.fail_on(3)
    except WorkerError as error:
        passed = time.time() - error.failed_at
        verdict = "ok" if passed <= FAILURE_SECONDS else "MISSED"
        print(
            f"rank {error.rank} raised; the controller had the error after {passed:.2f} s, "
            f"at most {FAILURE_SECONDS:.2f}  {verdict}"
        )


def report_start() -> None:
    """Report the start of a group of 4, and of 4 bare actors with the same imports; both are started once before."""
    code = "import torch, tensordict, mcontroller.data.batch"
    pool = RayResourcePool([4], use_gpu=False)

    def ours() -> None:
        RayWorkerGroup(pool, RayClassWithInitArgs(Importing, code), name_prefix="start").shutdown()

    def bare() -> None:
        actors = [BareImporting.remote(code) for _ in range(4)]  # type: ignore[attr-defined]
        ray.get([actor.ready.remote() for actor in actors])
        for actor in actors:
            ray.kill(actor)

    report("start of 4 ranks", interleaved({"ours": ours, "bare": bare}, 3), START_LIMIT)


def report(what: str, seconds: dict[str, float], limit: float) -> None:
    ours, bare = seconds["ours"], seconds["bare"]
    verdict = "ok" if ours / bare <= limit else "MISSED"
    print(f"{what:<34} {ours * 1e3:>9.2f} {bare * 1e3:>9.2f} {ours / bare:>7.2f} {limit:>8.2f}  {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.2, 15, 120])
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    ray.init("local", num_cpus=16, object_store_memory=2_000_000_000, include_dashboard=False, logging_level="ERROR")
    pool = RayResourcePool([LAYOUT.world_size], use_gpu=False)
    group, bare = group_of(LAYOUT, pool), BareRay(LAYOUT)
    print(f"{'median of ' + str(options.repeats):<34} {'ours ms':>9} {'bare ms':>9} {'ratio':>7} {'at most':>8}")
    for megabytes in options.megabytes:
        report_calls(group, bare, megabytes, options.repeats)
    seconds = interleaved({"ours": group.empty, "bare": bare.empty}, options.repeats, in_a_row=10)
    report("empty call", seconds, EMPTY_LIMIT)
    report_step(group, options.repeats)
    largest = make_batch(max(options.megabytes))
    size = largest.nbytes()
    peak = peak_memory(lambda: group.column(largest)) + size
    print(f"controller's private memory with {size / 1e6:.0f} MB: at most {peak / size:.2f} x the batch, with it")
    report_failure(group)
    group.shutdown()
    pool.shutdown()
    bare.close()
    report_start()
    ray.shutdown()


if __name__ == "__main__":
    main()
