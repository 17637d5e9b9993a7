"""Copies that the program does not wait for: what the host or another stream reads too early is poison."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.fake_cuda.streams import HostMemoryRace
from workers.weights.offload import Offload

VALUES = [1.0, 2.0, 3.0]
INT64_MAX = 2**63 - 1


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


WAITS: dict[str, Callable[[], object]] = {
    "the stream": lambda: torch.cuda.current_stream().synchronize(),
    "the device": torch.cuda.synchronize,
    "an event": lambda: torch.cuda.current_stream().record_event().synchronize(),
    "an event that is polled": lambda: torch.cuda.current_stream().record_event().query(),
    "a value": lambda: torch.ones(1, device="cuda").item(),
    "another copy": lambda: torch.ones(1, device="cuda").cpu(),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_copy_to_the_host_lands_when_the_host_waits(wait: Callable[[], object]) -> None:
    copy = on_host(torch.tensor(VALUES, device="cuda"))
    assert copy.isnan().all()
    wait()
    assert copy.tolist() == VALUES


def test_poison_of_every_dtype_is_no_plausible_value() -> None:
    positions = torch.arange(3, device="cuda").to("cpu", non_blocking=True)
    mask = torch.zeros(2, dtype=torch.bool, device="cuda").to("cpu", non_blocking=True)
    halves = torch.ones(2, dtype=torch.bfloat16, device="cuda").to("cpu", non_blocking=True)
    assert (positions.tolist(), mask.tolist(), halves.isnan().tolist()) == ([INT64_MAX] * 3, [True] * 2, [True] * 2)
    torch.cuda.synchronize()
    assert (positions.tolist(), mask.tolist(), halves.tolist()) == ([0, 1, 2], [False] * 2, [1.0] * 2)


def test_copies_that_torch_waits_for_are_complete() -> None:
    tensor = torch.tensor(VALUES, device="cuda")
    assert torch.empty(3).copy_(tensor, non_blocking=True).tolist() == VALUES  # pageable
    assert tensor.cpu().tolist() == torch.empty(3, pin_memory=True).copy_(tensor).tolist() == VALUES


def test_a_copy_to_the_device_lands_for_streams_that_come_after_it() -> None:
    source, other = torch.tensor(VALUES).pin_memory(), torch.cuda.Stream()
    early, same, late = [source.to("cuda", non_blocking=True) for _ in range(3)]
    event = torch.cuda.current_stream().record_event()
    doubled = [same * 2]
    with torch.cuda.stream(other):
        too_early = [early * 2]
        other.wait_event(event)
        doubled.append(late * 2)
    later = source.to("cuda", non_blocking=True)
    with torch.cuda.stream(other):
        too_early.append(later * 2)
        other.wait_stream(torch.cuda.default_stream())
        doubled.append(later * 2)
    assert all(tensor.tolist() == [2.0, 4.0, 6.0] for tensor in doubled)
    assert all(tensor.isnan().all() for tensor in too_early)


def test_host_memory_that_changes_before_the_host_waits_is_an_error() -> None:
    source = torch.tensor(VALUES).pin_memory()
    doubled = source.to("cuda", non_blocking=True) * 2
    source.zero_()
    with pytest.raises(HostMemoryRace):
        doubled.sum().item()
    source.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    source.fill_(1)


def test_an_offload_that_does_not_wait_for_its_reload_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, offload = torch.tensor(VALUES, device="cuda"), Offload()
    for waits in (True, False):
        offload.offload({"weights": [tensor]}, ["weights"])
        with monkeypatch.context() as patched:
            if not waits:
                patched.setattr(torch.cuda.Stream, "synchronize", lambda stream: None)
            offload.reload(release=True)
        if waits:
            assert tensor.tolist() == VALUES
    with pytest.raises(HostMemoryRace):
        torch.cuda.synchronize()
