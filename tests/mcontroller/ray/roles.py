"""Workers that the tests start. This module does not load torch, so that a rank is up in a fraction of a second."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

from mcontroller.dispatch.modes import Dispatch, Execute
from mcontroller.dispatch.registration import register
from mcontroller.worker import Worker
from parallel_state import DistGlobalInfo, DistRankInfo, ParallelLayout

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OTHERS = ("RAY_LOCAL_RANK", "RAY_LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


class Plain(Worker):
    """Does not call ``super().__init__()``."""

    def __init__(self, value: Any = None) -> None:
        self.value = value
        self.built_on = threading.current_thread()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def note(self, caller: str, number: int) -> None:
        self.notes = [*getattr(self, "notes", []), (caller, number)]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def noted(self) -> list[tuple[str, int]]:
        """Return the arguments of all calls of ``note``, in the order in which they ran."""
        return self.notes

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def runs_on_the_main_thread(self) -> bool:
        """As what sets a signal handler must."""
        signal.signal(signal.SIGUSR2, signal.getsignal(signal.SIGUSR2))
        return self.built_on is threading.current_thread() is threading.main_thread()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def of_a_class_of_its_own(self) -> Any:
        """Return an object whose class is in a module that only the ranks have."""
        module = sys.modules["only_on_ranks"] = types.ModuleType("only_on_ranks")
        module.Result = type("Result", (), {"__module__": "only_on_ranks"})
        return module.Result()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ignore_sigint_natively(self) -> None:
        """As a library in C does it: Python is not told."""
        sig_ign = ctypes.c_void_p(1)
        ctypes.CDLL(None).signal(signal.SIGINT, sig_ign)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ignores_sigint(self, _argument: int) -> bool:
        [ignored] = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigIgn"))
        return bool(int(ignored.split()[1], 16) >> (signal.SIGINT - 1) & 1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def environment(self) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in (*TORCHRUN, *OTHERS)}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get(self) -> Any:
        return self.value

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def echo(self, value: Any) -> Any:
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def first(self, value: Any) -> Any:
        return self.rank, value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def later(self, value: Any) -> Any:
        return self.rank, value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def wait_for_file(self, path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.01)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def keep(self, value: Any) -> None:
        self.value = value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def awaited(self, value: Any) -> Any:
        return self.rank, value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def scribble(self, array: Any) -> Any:
        array[:] = self.rank
        return array.sum()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def can_listen_on_master_port(self) -> bool:
        """As torch's store does: with its address reused."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", int(os.environ["MASTER_PORT"])))
        listener.listen()
        listener.close()
        return True

    def not_registered(self) -> int:
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_on(self, causes: dict[int, str]) -> None:
        """Ranks with a cause raise it; the others wait, as in a collective whose peer is gone."""
        if self.rank in causes:
            raise ValueError(causes[self.rank])
        block()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def fail_later_on(self, causes: dict[int, str]) -> None:
        self.fail_on(causes)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_on(self, rank: int, how: str) -> None:
        if self.rank == rank:
            os.write(1, b"x" * 100_000 + b"\nthe last words of a rank\n")
            end(how)
        block()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, timeout=2)
    def late_on(self, rank: int) -> int:
        if self.rank == rank:
            block()
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def patient_on(self, rank: int) -> None:
        if self.rank == rank:
            block()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, timeout=2)
    def hold_the_interpreter_on(self, rank: int) -> None:
        """Sleep in native code on one rank, without releasing the interpreter."""
        if self.rank == rank:
            ctypes.PyDLL(None).sleep(60)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, timeout=2)
    def stop_on(self, rank: int) -> None:
        """Stop the process of one rank."""
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGSTOP)

    def fail_without_text(self) -> None:
        raise Mute


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class Numbered(Worker):
    """Numbers its calls in the order in which they run."""

    def __init__(self) -> None:
        self.calls = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def number(self) -> int:
        self.calls += 1
        return self.calls


class NeverFinishes(Plain):
    """Has a ``before_shutdown`` that does not return."""

    def before_shutdown(self) -> None:
        block()


class Finishes(Plain):
    """Has something in progress that a shutdown waits for."""

    def before_shutdown(self) -> None:
        if not self.value:
            raise OSError("the disk is full")
        with open(f"{self.value}/{self.rank}", "w"):
            pass


class RaisesInInit(Worker):
    def __init__(self) -> None:
        if self.rank == 1:
            raise RuntimeError("rank 1 cannot be made")
        block()


class DiesInInit(Worker):
    def __init__(self) -> None:
        if self.rank == 0:
            end("exit")
        block()


class Neighbour(Worker):
    """Another role in the process of a ``Plain``."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get(self) -> str:
        return "neighbour"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def through_the_wall(self, role: str) -> Any:
        from mcontroller.ray.process import sibling

        return sibling(role).value


class Reporting(Worker):
    """Reports the coordinates of a layout, as a Megatron worker does."""

    def __init__(self, layout: ParallelLayout) -> None:
        self.layout = layout

    def get_megatron_rank_info(self) -> DistRankInfo:
        at = self.layout.coordinates(self.rank)
        return DistRankInfo(**{f"{axis}_rank": at[axis] for axis in ("tp", "dp", "pp", "cp")})

    def get_megatron_global_info(self) -> DistGlobalInfo:
        sizes = self.layout.sizes
        return DistGlobalInfo(**{f"{axis}_size": sizes[axis] for axis in ("tp", "dp", "pp", "cp")})

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE)
    def echo(self, value: Any) -> Any:
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_on(self, rank: int) -> None:
        if self.rank == rank:
            raise ValueError("no such thing")
        block()


class SameCoordinates(Reporting):
    """Every rank reports the coordinates of rank 0."""

    def get_megatron_rank_info(self) -> DistRankInfo:
        return DistRankInfo(tp_rank=0, dp_rank=0, pp_rank=0, cp_rank=0)


def block() -> None:
    while True:
        time.sleep(0.05)


def end(how: str) -> None:
    if how == "exit":
        os._exit(3)
    if how == "sys.exit":
        raise SystemExit(3)
    if how == "segfault":
        ctypes.string_at(0)
    os.kill(os.getpid(), signal.SIGKILL)
