"""Streams of the fake CUDA device, and the copies in flight on them: they land as late as CUDA allows.

Everything runs when it is called, except a copy with ``non_blocking=True`` between the device and page-locked memory of
the host. Its target is poison (NaN, or a large odd number) until

* the host waits for a stream that comes after the copy, if the target is on the host;
* an operation uses the target on a stream that comes after the copy, if the target is on the device. The host must not
  change the source until it has waited: that is an error.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tests.fake_cuda.tags import gpu, on_device, traffic


class HostMemoryRace(RuntimeError):
    """The host changed or released memory that a copy in flight uses."""


class _Copy:
    """A copy in flight.

    Attributes:
        target: the tensor that is poison; None after the copy has landed.
        source: the host memory that the device reads; None for a copy to the host.
        value: what lands.
        host: the address of the host's memory.
        released: whether that memory was released.
        streams: those that come after the copy.
    """

    def __init__(self, target: torch.Tensor, source: torch.Tensor | None, stream: Stream) -> None:
        self.value = target.data.clone()
        self.target: torch.Tensor | None = target.data  # without the version counter: autograd does not see it land
        self.source = source
        self.host = (target if source is None else source).data_ptr()
        self.released = False
        self.streams = {stream}
        target.data.fill_(_poison(target.dtype))

    def land(self) -> None:
        target, self.target = self.target, None
        if target is not None and target.untyped_storage().nbytes():  # not freed meanwhile
            target.copy_(self.value)

    def check_host(self) -> None:
        if self.released:
            raise HostMemoryRace(f"host memory was released while a copy of {self.value.nbytes} bytes used it")
        if self.source is not None and not torch.equal(_bytes_of(self.source), _bytes_of(self.value)):
            raise HostMemoryRace(
                f"host memory of shape {tuple(self.source.shape)} was changed while a copy of it to the device was in "
                "flight: wait for the stream first"
            )


def _poison(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


class _InFlight:
    """The copies that are in flight in this process.

    Attributes:
        copies: in the order in which they were started.
    """

    def __init__(self) -> None:
        self.copies: list[_Copy] = []
        self._lock = threading.RLock()

    def start(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Let a copy that was made land later."""
        with _of_the_device():
            self.copies.append(_Copy(target, None if on_device(source) else source.data, current_stream()))

    def use(self, operands: Sequence[torch.Tensor]) -> None:
        """Land the copies that come before an operation of the current stream and whose targets it uses."""
        storages = {operand.untyped_storage()._cdata for operand in operands if operand.layout == torch.strided}
        for copy in current_stream().copies():
            if copy.target is not None and copy.target.untyped_storage()._cdata in storages:
                with _of_the_device():
                    copy.land()

    def wait(self, copies: Sequence[_Copy]) -> None:
        """Land copies and end their use of host memory: the host has waited for them.

        Raises:
            HostMemoryRace: the host has changed what they read, or released what they use.
        """
        with self._lock:
            self.copies = [copy for copy in self.copies if copy not in copies]
        with _of_the_device():
            for copy in copies:
                copy.land()
            for copy in copies:
                copy.check_host()

    def release(self, start: int, size: int) -> None:
        """Mark the copies that use host memory which is released: an error when the host waits for them."""
        for copy in self.copies:
            copy.released |= start <= copy.host < start + size


@contextlib.contextmanager
def _of_the_device() -> Iterator[None]:
    """What runs inside is no operation of the program."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
        yield


in_flight = _InFlight()


class Stream:
    """A stream, on which only copies may be in flight."""

    cuda_stream = 0
    priority = 0
    device = property(lambda self: gpu())

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._outer: list[Stream] = []

    def copies(self) -> list[_Copy]:
        """Return the copies in flight that come before what is called on this stream next."""
        return [copy for copy in in_flight.copies if self in copy.streams]

    def synchronize(self) -> None:
        in_flight.wait(self.copies())

    def query(self) -> bool:
        self.synchronize()
        return True

    def wait_stream(self, stream: Stream) -> None:
        self._come_after(stream.copies())

    def wait_event(self, event: Event) -> None:
        self._come_after(event.copies)

    def _come_after(self, copies: Sequence[_Copy]) -> None:
        for copy in copies:
            copy.streams.add(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._outer.append(current_stream())
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        set_stream(self._outer.pop())


class Event:
    """An event with the time of the host, and the copies in flight before it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time = 0.0
        self.copies: list[_Copy] = []

    def record(self, stream: Stream | None = None) -> None:
        self.time = time.perf_counter()
        self.copies = (stream or current_stream()).copies()

    def elapsed_time(self, later: Event) -> float:
        return (later.time - self.time) * 1e3

    def query(self) -> bool:
        self.synchronize()
        return True

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        in_flight.wait(self.copies)
        self.copies = []


DEFAULT_STREAM = Stream()
"""The default stream of all GPUs."""


class _Current(threading.local):
    stream = DEFAULT_STREAM


_current = _Current()


def current_stream(device: Any = None) -> Stream:
    """Return the current stream of this thread."""
    return _current.stream


def set_stream(stream: Stream) -> None:
    """Set the current stream of this thread."""
    _current.stream = stream


def synchronize(device: Any = None) -> None:
    """Wait for all streams."""
    if in_flight.copies:
        in_flight.wait(in_flight.copies)


def _wait_for_current_stream() -> None:
    if in_flight.copies:
        current_stream().synchronize()


traffic.wait = _wait_for_current_stream
