"""The parts of a pass through the pipeline in the trace: each micro-batch forward and backward, sends and receives.

Status: run on one H100.

On a GPU the times are those of CUDA events, which are read when the trace is written next, and not of the host.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch

from mcontroller.trace.recorder import TraceRecorder, recorder, start_timer

_cuda: Any = torch.cuda  # its events have no types


class ScheduleTimers:
    """The ``timers`` that Megatron's schedules start and stop (``megatron.core.timers``), as events of a trace.

    ``forward-compute`` and ``backward-compute`` are the events ``forward`` and ``backward``, numbered in their order.

    Args:
        trace: gets the events.
        on_gpu: take the times from CUDA events, which are read when the trace is written next.
    """

    def __init__(self, trace: TraceRecorder, *, on_gpu: bool) -> None:
        self._timers: dict[str, _Timer] = {}
        self._on_gpu, self._ran = on_gpu, list[tuple[str, Any, Any, int]]()
        if on_gpu:
            trace.deferred.append(lambda: self._resolve(trace))

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        """Return the timer of a name."""
        if name not in self._timers:
            self._timers[name] = _Timer(name.removesuffix("-compute"), self._ran if self._on_gpu else None)
        return self._timers[name]

    def _resolve(self, trace: TraceRecorder) -> None:
        last = _recorded_event()
        last.synchronize()
        now = time.monotonic_ns()
        for name, begin, end, number in self._ran:
            ago = [int(event.elapsed_time(last) * 1e6) for event in (begin, end)]
            trace.add(name, now - ago[0], now - ago[1], number)


class _Timer:
    """Adds an event to the trace with the time from ``start`` to ``stop``; or to ``ran``, with two CUDA events."""

    def __init__(self, name: str, ran: list[tuple[str, Any, Any, int]] | None) -> None:
        self._name, self._ran, self._count = name, ran, 0

    def start(self, barrier: bool = False) -> Self:
        self._begin: Any = start_timer(number=self._count) if self._ran is None else _recorded_event()
        return self

    def stop(self, barrier: bool = False) -> None:
        if self._ran is None:
            self._begin(self._name)
        else:
            self._ran.append((self._name, self._begin, _recorded_event(), self._count))
        self._count += 1


def _recorded_event() -> Any:
    event = _cuda.Event(enable_timing=True)
    event.record()
    return event


@contextlib.contextmanager
def tracing(configs: Sequence[Any], device: torch.device) -> Iterator[None]:
    """Record what Megatron's schedules do while the block runs, if this rank is recorded.

    Args:
        configs: Megatron's configurations of this rank's model chunks; they get the timers.
        device: of the chunks.
    """
    trace = recorder()
    if trace is None:
        yield
        return
    timers = ScheduleTimers(trace, on_gpu=device.type == "cuda")
    for config in configs:
        config.timers = timers
    try:
        yield
    finally:
        for config in configs:
            config.timers = None
