"""The controller's cost of a call, from 8 to 16,384 ranks.

    python benchmarks/scale.py [--actors 8 24] [--light 8 128 1024 4096 16384]

Real Ray actors are compared with bare Ray, in alternation. Light endpoints are sockets of a few processes that answer
every call at once, so that one machine holds thousands: the controller does the same work for them as for workers. The
controller's CPU time includes ZeroMQ's thread, which encrypts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import resource
import select
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
import ray
import zmq

from mcontroller import (
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    WorkerGroup,
    register,
)
from mcontroller.channel.address import Address, ChannelKeys
from mcontroller.channel.options import ChannelOptions
from mcontroller.channel.wire import configure, pack_answer, unpack_call
from mcontroller.ray.calls.executor import RayExecutor
from mcontroller.ray.calls.supervision import GroupProcesses
from mcontroller.ray.node_processes import NodeProcess
from mcontroller.ray.process import ProcessInfo
from mcontroller.ray.process_handles import ProcessHandles
from parallel_state import ParallelLayout, Topology

TARGETS_MS = {8: 1.2, 24: 3.0}
LIGHT_TARGETS_MS = {128: 15.0}
CPU_TARGET_US = 60
SETTLE_SECONDS = 0.1  # what one of the alternatives leaves to background threads is not counted in the next


class Nothing(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def empty(self) -> None:
        return None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def same(self, value: Any) -> Any:
        return value


@ray.remote(num_cpus=0)
class BareNothing:
    def __init__(self) -> None:
        import tensordict  # noqa: F401  # as workers do, which are ready for a batch when they have started

    def empty(self) -> None:
        return None

    def same(self, value: Any) -> Any:
        return value


def measure(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, tuple[float, float]]:
    """Return the median time [ms] and the mean CPU time of this process [us] of each, run alternately."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    used: dict[str, float] = dict.fromkeys(runs, 0.0)
    rounds, batch = 10, max(1, repeats // 10)
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(SETTLE_SECONDS)
            before = time.process_time()
            for _ in range(batch):
                began = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - began)
            used[name] += time.process_time() - before
    return {name: (statistics.median(times[name]) * 1e3, used[name] / rounds / batch * 1e6) for name in runs}


def report_actors(ranks: int) -> None:
    pool = RayResourcePool([ranks], use_gpu=False)
    began = time.perf_counter()
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Nothing), name_prefix="ours")
    group.empty()
    started = time.perf_counter() - began
    began = time.perf_counter()
    bare = [BareNothing.remote() for _ in range(ranks)]  # type: ignore[attr-defined]
    ray.get([actor.empty.remote() for actor in bare])
    bare_started = time.perf_counter() - began
    runs = {"ours": group.empty, "bare": lambda: ray.get([actor.empty.remote() for actor in bare])}
    times = measure(runs, 2000)
    target = TARGETS_MS.get(ranks, float("inf"))
    (ours, cpu), (other, other_cpu) = times["ours"], times["bare"]
    verdict = "ok" if ours <= target and cpu / ranks <= CPU_TARGET_US else "MISSED"
    print(
        f"{ranks:>6} actors {ours:>9.2f} {other:>9.2f} {cpu / ranks:>9.0f} {other_cpu / ranks:>9.0f} "
        f"{started:>8.1f} {bare_started:>8.1f}  {verdict}"
    )
    group.shutdown()
    pool.shutdown()
    for actor in bare:
        ray.kill(actor)


def report_threshold(sizes: list[int], ranks: int) -> None:
    """Report the time of a call that takes and returns a value, inside messages and through the object store."""
    print(f"a value in and out of {ranks} actors, ms:  in messages / through the store")
    groups = {}
    for name, inline_bytes in (("messages", 1 << 28), ("store", 1000)):
        pool = RayResourcePool([ranks], use_gpu=False, channel=ChannelOptions(inline_bytes=inline_bytes))
        groups[name] = RayWorkerGroup(pool, RayClassWithInitArgs(Nothing), name_prefix=name)
    for size in sizes:
        value = np.zeros(size, np.uint8)
        times = measure(
            {name: lambda group=group, value=value: group.same(value) for name, group in groups.items()}, 50
        )
        print(f"{size / 1024:>8.0f} KiB {times['messages'][0]:>9.2f} {times['store'][0]:>9.2f}")
    for group in groups.values():
        group.shutdown()


class LightProcess:
    """A process that runs light endpoints, one batch after another."""

    def __init__(self) -> None:
        spawned = multiprocessing.get_context("spawn")  # a fork would copy the locks of Ray's threads
        self.pipe, there = spawned.Pipe()
        self.process = spawned.Process(target=serve_light, args=(there,), daemon=True)
        self.process.start()

    def start(self, keys: ChannelKeys, count: int) -> None:
        """Start ``count`` endpoints; end the earlier ones."""
        self.pipe.send((keys, count))


def serve_light(pipe: Connection) -> None:
    """Run light endpoints as the pipe asks: every call is answered with None."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    context: zmq.Context[Any] = zmq.Context()
    context.max_sockets = 60_000
    answer = pickle.dumps(None)
    sockets: list[zmq.Socket[Any]] = []
    while True:
        keys, count = pipe.recv()
        for sock in sockets:
            sock.close()
        sockets = [light_socket(context, keys) for _ in range(count)]
        poll = select.epoll()
        of_descriptor = {sock.fileno(): sock for sock in sockets}
        for descriptor in of_descriptor:
            poll.register(descriptor, select.EPOLLIN | select.EPOLLET)  # as ZeroMQ's descriptors are
        poll.register(pipe.fileno(), select.EPOLLIN)
        pipe.send([int(sock.last_endpoint.decode().rpartition(":")[2]) for sock in sockets])
        while not pipe.poll():
            for descriptor, _ in poll.poll(maxevents=len(sockets) + 1):
                if descriptor in of_descriptor:
                    answer_calls(of_descriptor[descriptor], answer)


def answer_calls(sock: zmq.Socket[Any], answer: bytes) -> None:
    """Answer every call that has arrived."""
    while int(sock.get(zmq.EVENTS)) & int(zmq.POLLIN):
        caller, first, *_ = sock.recv_multipart()
        packed = pack_answer(unpack_call(first)[0].number, None, False, answer)
        sock.send_multipart([caller, packed])


def light_socket(context: zmq.Context[Any], keys: ChannelKeys) -> zmq.Socket[Any]:
    sock = configure(context.socket(zmq.ROUTER))
    sock.curve_server, sock.curve_secretkey = True, keys.server.secret
    sock.bind("tcp://127.0.0.1:*")
    return sock


def start_light(processes: list[LightProcess], ranks: int) -> list[Address]:
    """Return the addresses of ``ranks`` endpoints, spread over the processes."""
    keys = ChannelKeys.generate()
    for index, process in enumerate(processes):
        process.start(keys, ranks // len(processes) + (index < ranks % len(processes)))
    ports = [port for process in processes for port in process.pipe.recv()]
    return [Address("127.0.0.1", port, port, keys.server.public, keys.client) for port in ports]


def light_group(addresses: list[Address]) -> WorkerGroup[Any]:
    process = NodeProcess(0, 0, None)
    node = ray.get_runtime_context().get_node_id()
    infos = [ProcessInfo("127.0.0.1", node, 0, (), address, 0, process) for address in addresses]
    handles = ProcessHandles(lambda: None, ChannelOptions(), infos=infos)
    topology = Topology.from_layout(ParallelLayout(len(addresses)))
    return WorkerGroup(Nothing, RayExecutor(GroupProcesses("light", handles), "light"), "light", topology=topology)


def report_light(ranks: int, processes: list[LightProcess]) -> None:
    addresses = start_light(processes, ranks)
    before = psutil.Process().memory_info().rss
    began = time.perf_counter()
    group = light_group(addresses)
    group.empty()
    connected = time.perf_counter() - began
    median, cpu = measure({"ours": group.empty}, max(10, min(300, 30_000 // ranks)))["ours"]
    memory = (psutil.Process().memory_info().rss - before) / ranks / 1e3
    target = LIGHT_TARGETS_MS.get(ranks, float("inf"))
    verdict = "ok" if median <= target and cpu / ranks <= CPU_TARGET_US else "MISSED"
    figures = f"{median:>9.2f} {'':>9} {cpu / ranks:>9.0f} {'':>9} {connected:>8.1f} {memory:>8.0f}"
    print(f"{ranks:>6} light  {figures}  {verdict}")
    group.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, nargs="*", default=[8, 24])
    parser.add_argument("--light", type=int, nargs="*", default=[8, 128, 1024, 4096, 16384])
    parser.add_argument("--threshold", type=int, nargs="*", default=[16, 64, 128, 256, 512, 1024, 4096], help="KiB")
    parser.add_argument("--processes", type=int, default=8, help="processes of light endpoints")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    processes = [LightProcess() for _ in range(options.processes if options.light else 0)]
    cpus = max([8, *options.actors]) + 2
    ray.init("local", num_cpus=cpus, object_store_memory=1_000_000_000, include_dashboard=False, logging_level="ERROR")
    print(
        "empty call: median ms, controller's CPU us a rank and call, start s (light: connections s, memory kB a rank)"
    )
    print(f"{'':>13} {'ours ms':>9} {'bare ms':>9} {'ours us':>9} {'bare us':>9} {'start s':>8} {'bare s':>8}")
    for ranks in options.actors:
        report_actors(ranks)
    for ranks in options.light:
        report_light(ranks, processes)
    if options.threshold:
        report_threshold([size * 1024 for size in options.threshold], 4)
    ray.shutdown()


if __name__ == "__main__":
    main()
