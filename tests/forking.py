"""Run a function on several real torch.distributed ranks, forked from this process after its imports.

A forked rank has already imported torch and Megatron: it starts in milliseconds, and a new interpreter in seconds. The
parent process must not have initialized torch.distributed.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from parallel_state.megatron import initialize_distributed

T = TypeVar("T")


class RankFailure(AssertionError):
    """A rank raised, died or did not finish.

    Attributes:
        ranks: the ranks that raised, died or did not finish.
        traceback: the traceback of the rank that raised; empty if it died or did not finish.
    """

    def __init__(self, message: str, ranks: list[int], traceback: str = "") -> None:
        super().__init__(message)
        self.ranks = ranks
        self.traceback = traceback


def run_ranks(fn: Callable[..., T], world_size: int, *args: Any, timeout_s: float = 120) -> list[T]:
    """Run ``fn(*args)`` on ``world_size`` forked ranks, and return their results by rank.

    torch.distributed is initialized on each rank (gloo, or NCCL with one GPU per rank). Results must be picklable;
    their tensors arrive on the CPU.

    Raises:
        RankFailure: the traceback of the first rank that failed; all other ranks are killed first.
    """
    assert not dist.is_initialized(), "a process that has initialized torch.distributed cannot be forked into ranks"
    ray = sys.modules.get("ray")
    # A fork while gRPC's threads poll may leave them with no thread that polls: the next call of Ray then never ends.
    assert ray is None or not ray.is_initialized(), "a process that is connected to Ray cannot be forked into ranks"
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="ranks") as store:
        ranks = [_Rank.fork(rank, world_size, store, fn, args, timeout_s) for rank in range(world_size)]
        try:
            return _collect(ranks, time.monotonic() + timeout_s)
        finally:
            for rank in ranks:
                rank.end()


class _Rank:
    def __init__(self, rank: int, pid: int, results: int) -> None:
        self.rank, self.pid, self.results = rank, pid, results
        self.received = bytearray()
        self._running = True

    @classmethod
    def fork(
        cls, rank: int, world_size: int, store: str, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
    ) -> _Rank:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _be_rank(rank, world_size, store, fn, args, timeout_s, writing)
        os.close(writing)
        with contextlib.suppress(PermissionError, ProcessLookupError):  # parent and child both try: either may be first
            os.setpgid(pid, pid)
        return cls(rank, pid, reading)

    def receive(self) -> bool:
        """Read a chunk, and return whether the message is complete or the pipe is closed."""
        chunk = os.read(self.results, 1 << 20)
        self.received += chunk
        return not chunk or len(self.received) == 8 + int.from_bytes(self.received[:8])

    def end(self) -> None:
        """Kill the rank and all processes that it started."""
        if self._running:
            self._running = False
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self.results)


def _be_rank(
    rank: int,
    world_size: int,
    store: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    timeout_s: float,
    results: int,
) -> None:
    """Run ``fn`` in the child process, and send its result; never returns."""
    try:
        os.setpgid(0, 0)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        if torch.cuda.is_available():
            torch.cuda.set_device(rank)
        initialize_distributed(
            rank=rank, world_size=world_size, init_method=f"file://{store}/rendezvous", timeout_s=timeout_s
        )
        payload = _pickled((True, fn(*args)))
    except BaseException:
        payload = pickle.dumps((False, traceback.format_exc()))
    try:
        with open(results, "wb") as pipe:
            pipe.write(len(payload).to_bytes(8))
            pipe.write(payload)
    except BrokenPipeError:
        os._exit(1)  # the parent has ended: this child must not go on with its tests
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pause()  # until the parent kills it: a peer may still communicate with this rank


class _HostPickler(pickle.Pickler):
    """Pickles tensors of a GPU as tensors of the host: the parent process must not initialize CUDA, it forks again."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            return value.cpu().__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


def _pickled(value: Any) -> bytes:
    _HostPickler(written := io.BytesIO()).dump(value)
    return written.getvalue()


def _collect(ranks: list[_Rank], deadline: float) -> list[Any]:
    """Read the results of all ranks as they arrive."""
    by_pipe = {rank.results: rank for rank in ranks}
    values: dict[int, Any] = {}
    while by_pipe:
        readable = wait(list(by_pipe), max(0.0, deadline - time.monotonic()))
        if not readable:
            late = sorted(rank.rank for rank in by_pipe.values())
            raise RankFailure(f"ranks {late} of {len(ranks)} did not finish in time", late)
        for pipe in readable:
            rank = by_pipe[pipe]
            if rank.receive():
                del by_pipe[pipe]
                values[rank.rank] = _value(rank)
    return [values[rank.rank] for rank in ranks]


def _value(rank: _Rank) -> Any:
    if not rank.received:
        raise RankFailure(f"rank {rank.rank} died without a result", [rank.rank])
    succeeded, value = pickle.loads(memoryview(rank.received)[8:])
    if not succeeded:
        raise RankFailure(f"rank {rank.rank}:\n{value}", [rank.rank], value)
    return value
