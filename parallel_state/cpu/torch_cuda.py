"""What Megatron calls in ``torch.cuda``, answered by the CPU.

Memory on the device is host memory, the device's random generator is the CPU's, streams and events are always done.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")
_HOST_MEMORY_BYTES = 1 << 34  # what mem_get_info reports; nothing is decided by it


class Stream:
    """A stream on which everything has already happened."""

    cuda_stream = 0
    device = _CPU
    priority = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0


class Event:
    """A mark in time; complete as soon as it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded_at = 0.0

    def record(self, stream: Any = None) -> None:
        self._recorded_at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to ``end``."""
        return (end._recorded_at - self._recorded_at) * 1e3

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


def redirect() -> None:
    """Put the CPU's answers in place of ``torch.cuda``'s, and make ``Tensor.cuda`` and its like the identity."""
    for name, answer in _cuda_answers().items():
        setattr(torch.cuda, name, answer)
    for name in ("get_rng_state", "set_rng_state", "manual_seed"):
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    torch.cuda.nvtx.range_push = _nothing()
    torch.cuda.nvtx.range_pop = _nothing()
    torch.Tensor.cuda = _itself()  # type: ignore[method-assign]
    torch.Tensor.pin_memory = _itself()  # type: ignore[method-assign]
    torch.Tensor.record_stream = _nothing()  # type: ignore[method-assign]
    torch.nn.Module.cuda = _itself()  # type: ignore[method-assign]


def _cuda_answers() -> dict[str, Any]:
    stream = Stream()
    answers: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "device_count": lambda: 1,
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(stream),
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda new_state, device=None: torch.set_rng_state(new_state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "default_generators": (torch.default_generator,),
        "mem_get_info": lambda device=None: (_HOST_MEMORY_BYTES, _HOST_MEMORY_BYTES),
        "memory_stats": lambda device=None: {},
    }
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        answers[name] = _zero()
    for name in ("set_device", "set_stream", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"):
        answers[name] = _nothing()
    return answers


# One function object per name: torch.compile keys its trace rules by the identity of the function.
def _nothing() -> Callable[..., None]:
    return lambda *args, **kwargs: None


def _zero() -> Callable[..., int]:
    return lambda *args, **kwargs: 0


def _itself() -> Callable[..., Any]:
    return lambda self, *args, **kwargs: self
