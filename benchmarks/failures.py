"""Time from the failure of one of 4 ranks to the controller's error, and the fields that the error has.

    python benchmarks/failures.py [--repeats 3]

The other ranks wait for the one that fails, as in a collective. Each failure starts a new group.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

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
    time.sleep(0.5)
    group.pid()
    return time.time()


def at_the_deadline(group: Any) -> float:
    group.wait_for(FAILING)
    return time.time()


FAILURES: dict[str, tuple[Callable[[Any], float], str]] = {
    "a rank raises": (in_call("raise"), "after the exception"),
    "a rank is killed in a call": (in_call("kill"), "after the signal"),
    "a rank was killed between calls": (while_idle, "after the next call"),
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
        passed = time.time() - began - (0.0 if name.endswith("deadline of 2 s") else 0.5)
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
    ray.shutdown()


if __name__ == "__main__":
    main()
