"""Time from the failure of one of 4 ranks to the controller's error, its fields, and what the watch costs.

    python benchmarks/failures.py [--repeats 3]

The other ranks wait for the one that fails, as in a collective, or there is no call. Each failure starts a new group.
The watch asks every rank once per ``ChannelOptions.watch_every`` whether it answers: its cost is that of a question, on
both sides, divided by this period.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import ray

from mcontroller import (
    CallTimeout,
    Dispatch,
    GroupError,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    register,
)
from mcontroller.channel.controller import ask
from mcontroller.channel.options import ChannelOptions

RANKS, FAILING, DEADLINE = 4, 2, 2.0
FIELDS = ("role", "rank", "method", "node", "pid")


class Failing(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, how: str, at: float) -> None:
        """Fail on one rank ``at`` this time; the others wait."""
        if self.rank == FAILING:
            time.sleep(max(0.0, at - time.time()))
            if how == "raise":
                raise ValueError("out of memory")
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, timeout=DEADLINE)
    def wait_for(self, rank: int) -> None:
        """One rank freezes; the others wait until the deadline."""
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        threading.Event().wait()


def in_call(how: str) -> Callable[[Any], float]:
    def run(group: Any) -> float:
        at = time.time() + 0.5
        group.fail(how, at)
        return at

    return run


def while_idle(group: Any) -> float:
    os.kill(group.pid()[FAILING], signal.SIGKILL)
    while group.broken is None:
        time.sleep(0.001)
    raise group.broken


class Raises(logging.Handler):
    """Keeps the last warning."""

    message = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.message = record.getMessage()


def stopped_while_idle(group: Any) -> float:
    """Wait until the watch logs that a rank is stopped."""
    pid, log = group.pid()[FAILING], Raises()
    logging.getLogger("mcontroller").addHandler(log)
    os.kill(pid, signal.SIGSTOP)
    while "is stopped" not in log.message:
        time.sleep(0.001)
    logging.getLogger("mcontroller").removeHandler(log)
    raise GroupError(log.message, role="failing", rank=FAILING, node="", pid=pid, method="no call")


def at_the_deadline(group: Any) -> float:
    group.wait_for(FAILING)
    return time.time()


FAILURES: dict[str, tuple[Callable[[Any], float], str]] = {
    "a rank raises": (in_call("raise"), "after the exception"),
    "a rank is killed in a call": (in_call("kill"), "after the signal"),
    "a rank is killed, no call": (while_idle, "after the signal"),
    "a rank is stopped, no call": (stopped_while_idle, "after the signal"),
    "a rank is stopped, deadline of 2 s": (at_the_deadline, "after the deadline"),
}


def measure(name: str) -> tuple[float, GroupError]:
    """Return the seconds until the controller has the error, and the error."""
    run, _ = FAILURES[name]
    pool = RayResourcePool([RANKS], use_gpu=False)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Failing), name_prefix="failing")
    pids = group.pid()
    began = time.time()
    try:
        run(group)
    except GroupError as error:
        passed = time.time() - began - (0.5 if name.endswith("in a call") or name == "a rank raises" else 0.0)
        if isinstance(error, CallTimeout):
            passed -= DEADLINE
        return passed, error
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        group.shutdown()
        pool.shutdown()
    raise AssertionError(f"{name}: no error")


def cost_of_watch(questions: int = 2000) -> tuple[float, float]:
    """Return the CPU time of a question of the watch in the controller and in a rank, each in us for a rank."""
    with RayResourcePool([RANKS], use_gpu=False, channel=ChannelOptions(watch_every=None)) as pool:
        group: Any = RayWorkerGroup(pool, RayClassWithInitArgs(Failing), name_prefix="asked")
        ranks = [psutil.Process(pid) for pid in group.pid()]
        addresses = [info.address for info in group.executor.processes.handles.infos]
        ask(addresses, "ping", timeout=None)
        before, began = [sum(rank.cpu_times()[:2]) for rank in ranks], time.process_time()
        for _ in range(questions):
            ask(addresses, "ping", timeout=None)
        controller = time.process_time() - began
        used = sum(sum(rank.cpu_times()[:2]) for rank in ranks) - sum(before)
        group.shutdown()
    return controller / questions / RANKS * 1e6, used / questions / RANKS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    ray.init("local", num_cpus=RANKS, object_store_memory=200_000_000, include_dashboard=False, logging_level="ERROR")
    print(f"{'median of ' + str(options.repeats):<36} {'seconds':>8}  since what, error and its fields")
    for name, (_, since) in FAILURES.items():
        found = [measure(name) for _ in range(options.repeats)]
        error = found[-1][1]
        fields = ", ".join(field for field in FIELDS if getattr(error, field, None) is not None)
        seconds = statistics.median(passed for passed, _ in found)
        print(f"{name:<36} {seconds:>8.2f}  {since}: {type(error).__name__} with {fields}")
    every = ChannelOptions().watch_every or float("inf")
    for side, cost in zip(("controller", "rank"), cost_of_watch(), strict=True):
        print(f"watch: a question takes {cost:.0f} us of CPU in the {side}: {cost / every / 1e4:.4f}% of a core a rank")
    ray.shutdown()


if __name__ == "__main__":
    main()
