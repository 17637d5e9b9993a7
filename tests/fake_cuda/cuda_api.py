"""What ``torch.cuda`` answers while the pretended device is on: one GPU with a Hopper's properties."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch

from tests.fake_cuda.tags import CUDA

MEMORY_BYTES = 140 << 30


class Stream:
    """A stream on which everything has run already."""

    cuda_stream = 0
    priority = 0
    device = CUDA

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0


class Event:
    """An event with the time of the host."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, later: Event) -> float:
        return (later.time - self.time) * 1e3

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


class Properties:
    """The properties that Megatron and torch ask for."""

    major, minor = 9, 0
    multi_processor_count = 132
    total_memory = MEMORY_BYTES
    name = "pretended CUDA device"


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def answers() -> dict[str, Any]:
    """Each name of ``torch.cuda`` that is replaced, with what replaces it."""
    stream = Stream()
    seed = torch.default_generator.manual_seed
    nothing = {"set_device", "set_stream", "synchronize", "empty_cache", "ipc_collect", "_lazy_init"}
    nothing |= {"reset_peak_memory_stats"}
    zero = {"memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"}
    return {
        **{name: _returns(None) for name in nothing},
        **{name: _returns(0) for name in zero},
        "is_available": _returns(True),
        "is_initialized": _returns(True),
        "is_bf16_supported": _returns(True),
        "is_current_stream_capturing": _returns(False),
        "current_device": _returns(0),
        "device_count": _returns(1),
        "current_stream": _returns(stream),
        "default_stream": _returns(stream),
        "stream": lambda chosen: contextlib.nullcontext(chosen),
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": seed,
        "manual_seed_all": seed,
        "default_generators": (torch.default_generator,),
        "mem_get_info": _returns((MEMORY_BYTES, MEMORY_BYTES)),
        "memory_stats": lambda device=None: {},
        "get_device_properties": _returns(Properties),
        "get_device_capability": _returns((Properties.major, Properties.minor)),
        "get_device_name": _returns(Properties.name),
        "_lazy_call": lambda call, **kwargs: call(),
    }


def install() -> None:
    """Replace them, and what else of torch asks whether there is an accelerator."""
    for name, answer in answers().items():
        setattr(torch.cuda, name, answer)
    for name in ("get_rng_state", "set_rng_state", "manual_seed"):
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = _returns(None)
    torch.cuda.nccl.version = _returns((2, 28, 9))
    torch._C._nccl_version = _returns(22809)
    torch.accelerator.current_device_index = _returns(0)
    torch.accelerator.current_accelerator = _returns(torch.device("cuda"))
    torch.accelerator.device_count = _returns(1)
    torch.optim.Optimizer._accelerator_graph_capture_health_check = _returns(None)
