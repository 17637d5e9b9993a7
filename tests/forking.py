"""Run a function on several real torch.distributed ranks, forked from this process after its imports.

A forked rank has torch and Megatron already: it starts in milliseconds where a fresh interpreter takes seconds. The
parent must not have joined torch.distributed itself.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from parallel_state.megatron import initialize_distributed

T = TypeVar("T")


class RankFailure(AssertionError):
    """A rank raised, died or did not finish; the message is its own traceback."""


def run_ranks(fn: Callable[..., T], world_size: int, *args: Any, timeout_s: float = 120) -> list[T]:
    """``fn(*args)`` on every one of ``world_size`` forked ranks; their results, by rank, through pickle.

    Inside ``fn`` torch.distributed runs (gloo, or NCCL with one GPU a rank) and ``dist.get_rank()`` is the rank.

    Raises:
        RankFailure: with the traceback of the first rank that failed; the others are ended before it is raised.
    """
    assert not dist.is_initialized(), "a process that has joined torch.distributed cannot be forked into ranks"
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
        with contextlib.suppress(PermissionError, ProcessLookupError):  # whoever is first makes the group
            os.setpgid(pid, pid)
        return cls(rank, pid, reading)

    def receive(self) -> bool:
        """Read on; whether the whole message is there, or nothing more can come."""
        chunk = os.read(self.results, 1 << 20)
        self.received += chunk
        return not chunk or len(self.received) == 8 + int.from_bytes(self.received[:8])

    def end(self) -> None:
        """End the rank and everything it started, however far it is."""
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
    """The child's whole life."""
    try:
        os.setpgid(0, 0)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        if torch.cuda.is_available():
            torch.cuda.set_device(rank)
        initialize_distributed(
            rank=rank, world_size=world_size, init_method=f"file://{store}/rendezvous", timeout_s=timeout_s
        )
        payload = pickle.dumps((True, fn(*args)))
    except BaseException:
        payload = pickle.dumps((False, traceback.format_exc()))
    with open(results, "wb") as pipe:
        pipe.write(len(payload).to_bytes(8))
        pipe.write(payload)
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pause()  # stay until all ranks are done: a peer may still be talking to this one


def _collect(ranks: list[_Rank], deadline: float) -> list[Any]:
    """The results of all ranks, read as they come."""
    by_pipe = {rank.results: rank for rank in ranks}
    values: dict[int, Any] = {}
    while by_pipe:
        readable, _, _ = select.select(list(by_pipe), [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            late = sorted(rank.rank for rank in by_pipe.values())
            raise RankFailure(f"ranks {late} of {len(ranks)} did not finish in time")
        for pipe in readable:
            rank = by_pipe[pipe]
            if rank.receive():
                del by_pipe[pipe]
                values[rank.rank] = _value(rank)
    return [values[rank.rank] for rank in ranks]


def _value(rank: _Rank) -> Any:
    if not rank.received:
        raise RankFailure(f"rank {rank.rank} died without a word")
    succeeded, value = pickle.loads(memoryview(rank.received)[8:])
    if not succeeded:
        raise RankFailure(f"rank {rank.rank}:\n{value}")
    return value
