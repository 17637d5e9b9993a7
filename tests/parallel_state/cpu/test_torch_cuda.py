"""What ``torch.cuda`` returns on a CPU after ``cpu.install``."""

from __future__ import annotations

import pytest
import torch

from parallel_state import cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")

cpu.install()


def test_the_current_device_is_the_cpu() -> None:
    torch.cuda.set_device(0)
    assert torch.cuda.current_device() == torch.device("cpu")
    assert torch.zeros(1, device=torch.cuda.current_device()).device == torch.device("cpu")
    assert torch.cuda.device_count() == 1
    assert torch.cuda.is_available() is False


def test_no_gpu_is_available_to_a_torch_that_is_built_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    assert torch.cuda.is_available() is False


def test_the_random_state_of_the_device_is_the_cpus() -> None:
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), first)
    assert torch.cuda.default_generators[0] is torch.default_generator
    assert torch.equal(torch.cuda.random.get_rng_state(), torch.get_rng_state())


def test_streams_and_events_are_always_complete() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.current_stream())
        event = stream.record_event()
    stream.wait_event(event)
    stream.synchronize()
    torch.cuda.synchronize()
    assert stream.query() and event.query()
    assert stream == torch.cuda.default_stream()
    assert torch.cuda.is_current_stream_capturing() is False


def test_elapsed_time_of_events_is_in_milliseconds() -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.ones(300, 300) @ torch.ones(300, 300)
    end.record()
    assert 0 < start.elapsed_time(end) < 10_000


def test_memory_statistics_are_zero() -> None:
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.empty_cache()
    names = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    assert [getattr(torch.cuda, name)() for name in names] == [0, 0, 0, 0]
    assert torch.cuda.memory_stats() == {}
    assert torch.cuda.mem_get_info() == (1 << 34, 1 << 34)


def test_cuda_and_pin_memory_return_the_same_object() -> None:
    tensor, module = torch.ones(2), torch.nn.Linear(2, 2)
    assert tensor.cuda(non_blocking=True) is tensor
    assert tensor.pin_memory() is tensor
    assert tensor.record_stream(torch.cuda.current_stream()) is None
    assert module.cuda(0) is module
