"""Megatron's writers of distributed checkpoints without the processes that they fork, which a simulated rank cannot.

An asynchronous checkpoint is written when it is scheduled.
"""

from __future__ import annotations

import importlib
import queue
from collections.abc import Sequence
from typing import Any

_STRATEGIES = "megatron.core.dist_checkpointing.strategies"


def in_process_writers() -> dict[Any, dict[str, Any]]:
    """Return what each rank replaces in Megatron: object -> attribute -> value."""
    writer = importlib.import_module(f"{_STRATEGIES}.filesystem_async")
    caller = importlib.import_module(f"{_STRATEGIES}.async_utils")
    replacements: dict[Any, dict[str, Any]] = {
        # From 0.17 on, Megatron writes on threads, under another name, and its function for the queue is public.
        writer.FileSystemWriterAsync: {"write_preloaded_data_multiproc": staticmethod(_write_all)},
        writer: {"_get_write_results_queue": queue.SimpleQueue, "get_write_results_queue": queue.SimpleQueue},
        caller.TemporalAsyncCaller: {"schedule_async_call": _write_now},
        caller.PersistentAsyncCaller: {"__init__": _without_queues, "schedule_async_call": _write_now},
    }
    return {
        owner: {name: value for name, value in values.items() if hasattr(owner, name)}
        for owner, values in replacements.items()
    }


def _write_all(transforms: Any, use_msc: bool, rank: int, buckets: Sequence[Any], results: Any) -> None:
    """Write every bucket; the arguments are those of ``FileSystemWriterAsync.write_preloaded_data_multiproc``."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    written: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    running: queue.Queue[int] = queue.Queue()  # each writer takes itself off
    by_index: dict[int, Any] = {}
    for index, bucket in enumerate(buckets):
        running.put(index)
        options = {"use_msc": True} if use_msc else {}
        FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, written, running, True, **options)
        _, result = written.get()
        if isinstance(result, Exception):
            results.put(result)
            return
        by_index[index] = result
    results.put(by_index)


def _without_queues(caller: Any) -> None:
    """Initialize a caller without the queues of its process, which starts another process of Python's."""
    caller.process = caller.start_time = caller.cur_item = None
    caller.cur_idx = -1


def _write_now(caller: Any, request: Any) -> None:
    """Write a checkpoint at once; the arguments are those of ``AsyncCaller.schedule_async_call``."""
    if request.async_fn is None:
        return
    args = list(request.async_fn_args)
    if request.preload_fn:
        args[1] = request.preload_fn()
    request.async_fn(*args, **request.async_fn_kwargs)
