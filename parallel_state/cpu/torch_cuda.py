"""Replace the functions of ``torch.cuda`` that Megatron calls.

The device's memory is the CPU's, or none (see ``device``), its random generator is the CPU's, and streams and events
are always complete.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self

import torch

from parallel_state.cpu.device import current

_MEMORY_BYTES = 1 << 34  # reported by mem_get_info; nothing depends on it
_PROPERTIES = SimpleNamespace(name="cpu", major=0, minor=0, total_memory=_MEMORY_BYTES, multi_processor_count=1)


class Stream:
    """A stream on which all work is complete; it has the interface of ``torch.cuda.Stream``."""

    cuda_stream = 0
    priority = 0

    @property
    def device(self) -> torch.device:
        """The device."""
        return current.torch

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Return a stream; the arguments are ignored."""
        return super().__new__(cls)

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True."""
        return True

    def wait_stream(self, stream: Any) -> None:
        """Return at once."""

    def wait_event(self, event: Any) -> None:
        """Return at once."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event``, or a new event, and return it."""
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
    """A point in time, complete when it is recorded; it has the interface of ``torch.cuda.Event``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded_at = 0.0

    def record(self, stream: Any = None) -> None:
        """Set the event to the current time."""
        self._recorded_at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from this event to ``end``."""
        return (end._recorded_at - self._recorded_at) * 1e3

    def query(self) -> bool:
        """Return True."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""


def patch_cuda() -> None:
    """Patch ``torch.cuda``; ``Tensor.cuda`` and ``Module.cuda`` move to the device that stands for the GPU."""
    for name, replacement in _replacements().items():
        setattr(torch.cuda, name, replacement)
    for name in ("get_rng_state", "set_rng_state", "manual_seed"):
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    torch.cuda.nccl.version = lambda: (0, 0, 0)  # torch logs it for groups whose backend is called nccl
    torch.cuda.nvtx.range_push = _nothing()
    torch.cuda.nvtx.range_pop = _nothing()
    torch.Tensor.cuda = _tensor_to_device  # type: ignore[method-assign, assignment]
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.Tensor.record_stream = _nothing()  # type: ignore[method-assign]
    torch.nn.Module.cuda = _module_to_device  # type: ignore[method-assign, assignment]


def _replacements() -> dict[str, Any]:
    stream = Stream()
    replacements: dict[str, Any] = {
        "current_device": lambda: current.torch,
        "device_count": lambda: 1,
        # With PYTORCH_NVML_BASED_CUDA_CHECK=1, a torch that is built for CUDA would ask device_count.
        "is_available": lambda: False,
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
        "mem_get_info": lambda device=None: (_MEMORY_BYTES, _MEMORY_BYTES),
        "memory_stats": lambda device=None: {},
        "get_device_properties": lambda device=None: _PROPERTIES,
    }
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        replacements[name] = lambda *args, **kwargs: 0
    for name in ("set_device", "set_stream", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"):
        replacements[name] = _nothing()
    return replacements


def _tensor_to_device(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return self if current.has_memory else self.to(current.torch)


def _module_to_device(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    if current.has_memory:
        return self
    moved: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # several modules may share a parameter
    for module in self.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                if parameter not in moved:
                    moved[parameter] = torch.nn.Parameter(parameter.detach().to(current.torch), parameter.requires_grad)
                    vars(moved[parameter]).update(vars(parameter))  # Megatron's attributes
                setattr(module, name, moved[parameter])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(current.torch))
    return self


# Each name needs its own function object: torch.compile looks up its trace rules by the identity of a function.
def _nothing() -> Callable[..., None]:
    return lambda *args, **kwargs: None
