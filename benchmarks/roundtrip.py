"""Round trips of a batch through 8 worker processes (TP2 x PP2 x DP2), compared to bare Ray and to memory bandwidth.

    python benchmarks/roundtrip.py [--megabytes 0.2 15 120] [--repeats 20] [--peer-python PATH ...]

Bare Ray is the minimum of correct hand-written code: one put per shard, one task per rank, one get of the ranks that
return. Both write a batch of 120 MB into the store; a call whose part of the store this process has not touched before
takes 28,600 page faults and 50 to 100 ms longer, in both.
``--peer-python`` is the interpreter of an environment that has verl 0.4 or 0.9, which then runs the same calls.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
from ray.dag import InputNode, MultiOutputNode
from ray.dag.compiled_dag_node import CompiledDAG
from ray.exceptions import RayChannelTimeoutError
from roundtrip_floor import KINDS

from mcontroller import (
    DataProto,
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    WorkerError,
    WorkerGroup,
    register,
)
from parallel_state import ParallelLayout, Topology

LAYOUT = ParallelLayout(8, tp=2, pp=2)
TOPOLOGY = Topology.from_layout(LAYOUT)
SEQUENCE = 1024
STEP_SECONDS, STEP_MEGABYTES = 0.2, 0.2
STEPS_IN_A_ROW = 10
SETTLE_SECONDS = 0.1
TARGETS = {0.2: 0.5, 15: 1.05, 120: 1.05}
EMPTY_SECONDS = 1.2e-3
PEER_TARGETS = {0.2: 1.5, 15: 3.0, 120: 10.0}


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
        """The other ranks wait, as in a collective."""
        if self.rank == rank:
            raise ValueError("out of memory")
        threading.Event().wait()


@ray.remote(num_cpus=1)
class Bare:
    def column(self, shard: dict[str, np.ndarray], collected: bool) -> Any:
        return shard["score"] if collected else None

    def metrics(self, shard: dict[str, np.ndarray], collected: bool) -> Any:
        return {"rows": len(shard["score"])} if collected else None

    def empty(self, nothing: None = None) -> None:
        return None


class BareRay:
    """The same work as ``Ours``, written by hand for this layout."""

    def __init__(self) -> None:
        self.actors = [Bare.remote() for _ in range(LAYOUT.world_size)]  # type: ignore[attr-defined]
        self.shard_of = TOPOLOGY.shard_indices(("dp",))
        self.collected = TOPOLOGY.select(tp=0, pp=-1)
        ray.get([actor.empty.remote() for actor in self.actors])

    def call(self, method: str, batch: DataProto) -> list[Any]:
        columns = {name: tensor.numpy() for name, tensor in batch.batch.items()}
        half = len(batch) // LAYOUT.dp
        shards = [
            ray.put({name: array[part * half : (part + 1) * half] for name, array in columns.items()})
            for part in range(LAYOUT.dp)
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

    def compiled_empty(self) -> CompiledDAG:
        with InputNode() as nothing:
            return MultiOutputNode([actor.empty.bind(nothing) for actor in self.actors]).experimental_compile()


class Importing(Worker):
    def __init__(self, code: str) -> None:
        exec(code)


@ray.remote(num_cpus=1)
class BareImporting:
    def __init__(self, code: str) -> None:
        exec(code)

    def ready(self) -> None:
        return None


def make_batch(megabytes: float) -> DataProto:
    rows = max(2, round(megabytes * 1e6 / (SEQUENCE * 28)) // 2 * 2)
    ids = {name: torch.randint(0, 100, (rows, SEQUENCE)) for name in ("input_ids", "attention_mask", "position_ids")}
    return DataProto.from_dict({**ids, "score": torch.rand(rows, SEQUENCE)})


def interleaved(runs: dict[str, Callable[[], Any]], repeats: int, *, in_a_row: int = 1) -> dict[str, float]:
    """Return the median seconds of each, run alternately so that other load on the machine slows all of them.

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
    return {name: statistics.median(taken) for name, taken in times.items()}


def bandwidth() -> float:
    """Return the bytes per second of one copy of 120 MB into memory that has been touched before."""
    source = np.ones(120_000_000, np.uint8)
    target = source.copy()
    return source.nbytes / interleaved({"copy": lambda: np.copyto(target, source)}, 5)["copy"]


def peak_memory(run: Callable[[], Any]) -> int:
    """Return the bytes by which ``run`` raises the resident memory of this process at its peak, with shared memory."""
    process, stop, most = psutil.Process(), threading.Event(), [0]
    before = process.memory_info().rss

    def sample() -> None:
        while not stop.wait(0.001):
            most[0] = max(most[0], process.memory_info().rss)

    sampler = threading.Thread(target=sample)
    sampler.start()
    run()
    stop.set()
    sampler.join()
    return most[0] - before


class Nowhere:
    """A transport that answers at once, without ranks: a call takes the time of the controller alone."""

    transport = "nowhere"
    parts = lengths = ()
    number = 0

    def __init__(self, world_size: int, answer: Any) -> None:
        self.world_size = world_size
        self.nodes = ["nowhere"] * world_size
        self.answer = answer

    def set_coordinates(self, coordinates: Any) -> None:
        pass

    def share(self, value: Any, readers: int) -> Any:
        return value

    def submit(self, method: str, arguments: Any, returning: Any, **options: Any) -> Nowhere:
        self.values = [self.answer for _ in returning]
        return self

    def result(self, timeout: float | None = None) -> list[Any]:
        return self.values

    def fetch(self, handles: Any) -> list[Any]:
        return list(handles)

    def shutdown(self) -> None:
        pass


def report_cost_per_rank() -> None:
    print("the controller's time for a call with metrics out (tp 2, pp 2), without a transport; in the second figure")
    print("per rank, Python's garbage collector is off:")
    answer = DataProto(meta_info={"metrics": {"rows": 2}})
    for world_size in (8, 64, 512, 4096):
        topology = Topology.from_layout(ParallelLayout(world_size, tp=2, pp=2))
        group = WorkerGroup(Ours, Nowhere(world_size, answer), "nowhere", topology=topology)
        batch = DataProto.from_dict({"ids": torch.zeros(world_size // 2, 8)})
        runs = {"call": lambda group=group, batch=batch: group.metrics(batch)}
        taken = interleaved(runs, 9)["call"]
        gc.disable()
        quiet = interleaved(runs, 9)["call"]
        gc.enable()
        per_rank = f"{taken / world_size * 1e6:>8.1f} {quiet / world_size * 1e6:>8.1f} us per rank"
        print(f"{world_size:>6} ranks {taken * 1e3:>9.2f} ms {per_rank}")


def report_compiled(bare: BareRay, repeats: int) -> None:
    """Report the empty call as one of Ray's compiled graphs, which fixes its method and its actors in advance."""
    graph = bare.compiled_empty()
    runs = {"compiled": lambda: ray.get(graph.execute(None)), "bare": bare.empty}
    try:
        taken = interleaved(runs, repeats, in_a_row=10)
        compiled, plain = taken["compiled"], taken["bare"]
        figures = f"{compiled * 1e3:>9.2f} {plain * 1e3:>9.2f} {compiled / plain:>7.2f}"
    except RayChannelTimeoutError as error:
        figures = str(error).splitlines()[0]
    print(f"{'empty call, compiled graph':<34} {figures}")
    graph.teardown()


def report_step(group: Any, repeats: int) -> None:
    """Report what two calls add to a training step, whose work is a sleep that needs no core; and the least possible.

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

    def sent() -> None:
        loss = group.forward_backward.options(blocking=False)(batch)
        norm = group.optim_step.options(blocking=False)()
        loss.get()
        norm.get()

    def alone_in_a_row() -> None:
        for _ in range(STEPS_IN_A_ROW):
            alone()

    def read_late() -> None:
        before: list[Any] = []
        for _ in range(STEPS_IN_A_ROW):
            loss = group.forward_backward.options(blocking=False)(batch)
            norm = group.optim_step.options(blocking=False)()
            for future in before:
                future.get()
            before = [loss, norm]
        for future in before:
            future.get()

    taken = interleaved({"alone": alone, "waited": waited, "sent": sent}, repeats)
    rows = {
        "each waited for": taken["waited"] - taken["alone"],
        "both sent, then waited for": taken["sent"] - taken["alone"],
    }
    taken = interleaved({"alone": alone_in_a_row, "late": read_late}, max(3, repeats // STEPS_IN_A_ROW))
    rows[f"{STEPS_IN_A_ROW} steps, each read while the next runs"] = (taken["late"] - taken["alone"]) / STEPS_IN_A_ROW
    print(f"added to a step of {STEP_SECONDS:g} s by forward_backward, with {STEP_MEGABYTES:g} MB, and by optim_step:")
    for what, seconds in rows.items():
        print(f"  {what:<48} {seconds * 1e3:>6.2f} ms {seconds / STEP_SECONDS:>6.1%}")
    script = Path(__file__).with_name("roundtrip_floor.py")
    rows_of = len(batch) // LAYOUT.dp
    command = [sys.executable, str(script), "--rows", str(rows_of), "--repeats", str(repeats)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    for kind, seconds in json.loads(done.stdout).items():
        print(f"  {KINDS[kind]:<48} {seconds * 1e3:>6.2f} ms {seconds / STEP_SECONDS:>6.1%}")


def report_failure(group: Any) -> None:
    """Report how long after a rank raised the controller has its error, while the other ranks wait for it."""
    try:
        group.fail_on(3)
    except WorkerError as error:
        passed = time.time() - error.failed_at
        verdict = "ok" if passed <= 1 else "MISSED"
        print(f"rank {error.rank} raised; the controller had the error after {passed:.2f} s, at most 1.00  {verdict}")


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

    taken = interleaved({"ours": ours, "bare": bare}, 3)
    report("start of 4 ranks", taken["ours"], taken["bare"], 1.3)


def report(what: str, ours: float, bare: float, target: float) -> None:
    verdict = "ok" if ours / bare <= target else "MISSED"
    print(f"{what:<34} {ours * 1e3:>9.2f} {bare * 1e3:>9.2f} {ours / bare:>7.2f} {target:>8.2f}  {verdict}")


def report_peer(python: str, options: argparse.Namespace, ours: dict[str, float]) -> None:
    """Report the ratio of the peer's times for the same calls, which it makes after ours have ended."""
    script = Path(__file__).with_name("roundtrip_verl.py")
    sizes = [f"{megabytes:g}" for megabytes in options.megabytes]
    command = [python, str(script), "--repeats", str(options.repeats), "--megabytes", *sizes]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    peer_report = json.loads(done.stdout.splitlines()[-1])
    print(f"{'verl ' + peer_report['version']:<34} {'verl ms':>9} {'ours ms':>9} {'ratio':>7} {'at least':>8}")
    for key, taken in ours.items():
        target, peer = PEER_TARGETS.get(float(key.split()[0]), 1.0), peer_report["seconds"][key]
        verdict = "ok" if peer / taken >= target else "MISSED"
        name = key.replace(" ", " MB: ")
        print(f"{name:<34} {peer * 1e3:>9.2f} {taken * 1e3:>9.2f} {peer / taken:>7.2f} {target:>8.2f}  {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.2, 15, 120])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--peer-python", nargs="*", default=[], help="interpreters of environments with verl 0.4 or 0.9"
    )
    options = parser.parse_args()
    ray.init("local", num_cpus=16, object_store_memory=2_000_000_000, include_dashboard=False, logging_level="ERROR")
    pool = RayResourcePool([8], use_gpu=False)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Ours), name_prefix="ours", topology=TOPOLOGY)
    bare = BareRay()
    print(f"{'median of ' + str(options.repeats):<34} {'ours ms':>9} {'bare ms':>9} {'ratio':>7} {'at most':>8}")
    ours: dict[str, float] = {}
    for megabytes in options.megabytes:
        batch = make_batch(megabytes)
        assert np.array_equal(group.column(batch).batch["score"].numpy(), bare.column(batch))
        for method, what in (("column", "batch in, a column out"), ("metrics", "batch in, metrics out")):
            runs = {
                "ours": lambda method=method, batch=batch: getattr(group, method)(batch),
                "bare": lambda method=method, batch=batch: getattr(bare, method)(batch),
            }
            taken = interleaved(runs, options.repeats)
            target = TARGETS.get(megabytes, max(TARGETS.values()))
            report(f"{megabytes:g} MB: {what}", taken["ours"], taken["bare"], target)
            ours[f"{megabytes:g} {method}"] = taken["ours"]
    taken = interleaved({"ours": group.empty, "bare": bare.empty}, options.repeats, in_a_row=10)
    report("empty call", taken["ours"], taken["bare"], EMPTY_SECONDS / taken["bare"])
    report_compiled(bare, options.repeats)
    report_step(group, options.repeats)
    largest = make_batch(max(options.megabytes))
    size = largest.nbytes()
    print(f"memory bandwidth: {bandwidth() / 1e9:.1f} GB/s (one copy, one thread)")
    peak = peak_memory(lambda: group.column(largest)) + size
    print(f"controller's peak with a batch of {size / 1e6:.0f} MB: {peak / size:.2f} x the batch, itself included")
    report_failure(group)
    group.shutdown()
    pool.shutdown()
    for actor in bare.actors:
        ray.kill(actor)
    report_start()
    ray.shutdown()
    for python in options.peer_python:
        report_peer(python, options, ours)
    if not options.peer_python:
        print("verl: not measured (pass the interpreters of its environments with --peer-python)")
    report_cost_per_rank()


if __name__ == "__main__":
    main()
