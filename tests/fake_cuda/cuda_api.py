"""The answers of ``torch.cuda`` while the fake CUDA device is on: GPUs with a Hopper's properties."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

from tests.fake_cuda import streams
from tests.fake_cuda.pinned import runtime
from tests.fake_cuda.reserved import limit_bytes, reserved_by_all
from tests.fake_cuda.tags import (
    GPUS,
    Memory,
    current,
    device_of,
    gpu,
    gpu_count,
    initialization,
    mark,
    measure,
    memory,
    traffic,
)

MEMORY_BYTES = 140 << 30


class Properties:
    """The properties that Megatron and torch ask for."""

    major, minor = 9, 0
    multi_processor_count = 132
    total_memory = MEMORY_BYTES
    name = "fake CUDA device"

    def __init__(self, index: int) -> None:
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        self.uuid = f"GPU-{visible[index] if visible else index}"


def _check_error(result: int) -> None:
    if result:
        raise RuntimeError(f"CUDA error {result}")


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _using(answer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that initializes CUDA first."""

    def use(*args: Any, **kwargs: Any) -> Any:
        initialization.use()
        return answer(*args, **kwargs)

    return use


def _current_index() -> int:
    return current.index


def answers() -> dict[str, Any]:
    """Each name of ``torch.cuda`` that is replaced, with what replaces it."""
    seed = torch.default_generator.manual_seed
    return {
        "_lazy_init": _using(_returns(None)),
        "init": _using(_returns(None)),
        **_memory_answers(),
        "is_available": _returns(True),
        "is_initialized": lambda: initialization.pid == os.getpid(),
        "is_bf16_supported": _returns(True),
        "is_current_stream_capturing": _returns(False),
        "current_device": _using(_current_index),
        "set_device": lambda device: _exchange(_index(device)) and None,
        "_exchange_device": _using(_exchange),
        "_maybe_exchange_device": _using(_exchange_without_context),
        "device_count": gpu_count,
        "synchronize": _using(streams.synchronize),
        "set_stream": _using(streams.set_stream),
        "current_stream": _using(streams.current_stream),
        "default_stream": _using(_returns(streams.DEFAULT_STREAM)),
        "cudart": _using(_returns(runtime)),
        "check_error": _check_error,
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "Stream": streams.Stream,
        "ExternalStream": streams.Stream,
        "Event": streams.Event,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": seed,
        "manual_seed_all": seed,
        "default_generators": (torch.default_generator,) * len(GPUS),
        "get_device_properties": _using(lambda device=None: Properties(_index(device))),
        "get_device_capability": _using(_returns((Properties.major, Properties.minor))),
        "get_device_name": _using(_returns(Properties.name)),
        "set_sync_debug_mode": traffic.set_sync_debug_mode,
        "_lazy_call": lambda call, **kwargs: call(),
    }


def _index(device: Any = None) -> int:
    """Return the index of a device, by default of the current one; raise CUDA's error if there is none."""
    device = torch.device(device) if isinstance(device, str) else device
    return gpu(device.index if isinstance(device, torch.device) else device).index


def _exchange(index: int) -> int:
    """Set the current device unless the index is negative, as torch does; return the index of the last one."""
    if index >= 0:
        memory[gpu(index)].open()
    return _exchange_without_context(index)


def _exchange_without_context(index: int) -> int:
    last = current.index
    if index >= 0:
        current.index = gpu(index).index
    return last


def _memory_of(device: Any = None) -> Memory:
    return memory[gpu(_index(device))]


def _free(of: Memory) -> int:
    limit = limit_bytes()
    return MEMORY_BYTES - of.used if limit is None else limit - reserved_by_all(of.index)


def _empty_all() -> None:
    for pool in memory.values():
        pool.empty()


def _memory_answers() -> dict[str, Any]:
    """Figures of the live storages of this process: bytes without the allocator's rounding and fragmentation."""
    return {
        "memory_allocated": lambda device=None: _memory_of(device).allocated,
        "max_memory_allocated": lambda device=None: _memory_of(device).peak,
        "memory_reserved": lambda device=None: _memory_of(device).reserved,
        "max_memory_reserved": lambda device=None: _memory_of(device).peak_reserved,
        "reset_peak_memory_stats": lambda device=None: _memory_of(device).reset_peak(),
        "empty_cache": _empty_all,
        "mem_get_info": _using(lambda device=None: (_free(_memory_of(device).open()), limit_bytes() or MEMORY_BYTES)),
        "memory_stats": lambda device=None: _statistics(_memory_of(device)),
    }


def _statistics(of: Memory) -> dict[str, int]:
    return {
        "allocated_bytes.all.current": of.allocated,
        "allocated_bytes.all.peak": of.peak,
        "reserved_bytes.all.current": of.reserved,
        "reserved_bytes.all.peak": of.peak_reserved,
    }


def _measuring(resize: Callable[..., Any]) -> Callable[..., Any]:
    def resize_(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        measure(storage)
        return result

    return resize_


def _marking(clone: Callable[..., Any]) -> Callable[..., Any]:
    def marked_clone(storage: Any) -> Any:
        copy = clone(storage)
        block = getattr(storage, "_block", None)
        if block is not None:
            mark(copy, block.device)
        return copy

    return marked_clone


def _metadata(tensor: torch.Tensor) -> dict[str, Any]:
    """Describe a tensor that is recomputed; torch compares this with the first computation."""
    return {"shape": tensor.shape, "dtype": tensor.dtype, "device": device_of(tensor)}


def install() -> None:
    """Replace them, and what else of torch asks whether there is an accelerator."""
    for name, answer in answers().items():
        setattr(torch.cuda, name, answer)
    for name in _memory_answers():
        setattr(torch.cuda.memory, name, getattr(torch.cuda, name))
    torch.Tensor.record_stream = _returns(None)  # parses its argument before a mode sees the call
    torch.UntypedStorage.clone = _marking(torch.UntypedStorage.clone)
    torch.UntypedStorage.resize_ = _measuring(torch.UntypedStorage.resize_)
    for name in ("get_rng_state", "set_rng_state", "manual_seed"):
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = _returns(None)
    torch.cuda.nccl.version = _returns((2, 28, 9))
    torch._C._nccl_version = _returns(22809)
    torch.accelerator.current_device_index = lambda: current.index
    torch.accelerator.current_accelerator = _returns(torch.device("cuda"))
    torch.accelerator.device_count = gpu_count
    torch.utils.checkpoint._allowed_determinism_checks_to_fns["default"] = _metadata
    torch.optim.Optimizer._accelerator_graph_capture_health_check = _returns(None)
