"""torch's ProcessGroupNCCL as a program sees it that creates one itself, over gloo: its options, waits and watchdog.

It follows torch's ProcessGroupNCCL.cpp: error handling is chosen by an environment variable when the group is created;
the first operation of a pair of ranks blocks until the other one starts its own; ``wait(timeout)`` counts from the
start of the operation; and a watchdog ends the process if an operation takes longer than the timeout of the group,
unless the error handling says otherwise.
"""

from __future__ import annotations

import datetime
import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from tests.fake_cuda.streams import in_flight
from tests.fake_cuda.tags import on_device

_NEVER = datetime.timedelta(days=1)
_TEAR_DOWN, _CLEAN_UP = (1, 3), (1, 2)  # of ErrorHandlingMode; 3, the default, tears down without cleaning up


class Options:
    """The options of a group."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = datetime.timedelta(minutes=10)


class Work:
    """An operation that is running."""

    def __init__(self, carried: Any) -> None:
        self.started = time.monotonic()
        self.error: Exception | None = None
        self.finished = threading.Event()
        threading.Thread(target=self._carry, args=(carried,), daemon=True).start()

    def _carry(self, carried: Any) -> None:
        try:
            carried.wait(_NEVER)
        except RuntimeError as error:
            self.error = self.error or error
        self.finished.set()

    def is_completed(self) -> bool:
        """Whether it has ended, or failed."""
        return self.error is not None or self.finished.is_set()

    def times_out(self, timeout: datetime.timedelta) -> bool:
        """Fail, and return True, if it has run for so long and has not ended."""
        if self.is_completed() or time.monotonic() - self.started < timeout.total_seconds():
            return False
        self.error = RuntimeError(f"Watchdog caught collective operation timeout: ran for more than {timeout}")
        return True

    def wait(self, timeout: datetime.timedelta = _NEVER) -> bool:
        """Block until it has ended; raise if it fails, or has run for ``timeout`` since it was started."""
        while not self.is_completed() and not self.times_out(timeout):
            self.finished.wait(0.001)
        if self.error is not None:
            raise self.error
        return True


class ProcessGroupNCCL:
    """A group that its ranks create themselves, without ``new_group``."""

    Options = Options

    def __init__(self, store: Any, rank: int, size: int, options: Options | None = None) -> None:
        self._store, self._rank, self._timeout = store, rank, (options or Options())._timeout
        self._handling = int(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"))
        self._pairs: dict[int, Any] = {}
        self._works: list[Work] = []
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        """Start to send a tensor."""
        return self._start("send", tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        """Start to receive a tensor."""
        return self._start("recv", tensors, peer, tag)

    def abort(self) -> None:
        """End all operations."""
        self._ended.set()
        for pair in self._pairs.values():
            pair.abort()

    def _start(self, operation: str, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        if not all(on_device(tensor) and tensor.is_contiguous() for tensor in tensors):
            raise RuntimeError(f"{operation}: NCCL takes contiguous tensors on a GPU")
        in_flight.use(tensors)
        low, high = sorted((self._rank, peer))
        if peer not in self._pairs:
            store = dist.PrefixStore(f"{low}:{high}", self._store)
            self._pairs[peer] = dist.ProcessGroupGloo(store, int(self._rank == high), 2, _NEVER)  # blocks
        work = Work(getattr(self._pairs[peer], operation)(tensors, int(peer == high), tag))
        self._works.append(work)
        return work

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            if any([work.times_out(self._timeout) for work in self._works]):
                if self._handling in _TEAR_DOWN:
                    sys.stderr.write("To avoid data inconsistency, we are taking the entire process down.\n")
                    sys.stderr.flush()
                    os.abort()
                if self._handling in _CLEAN_UP:
                    self.abort()
