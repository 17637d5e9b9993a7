"""ChannelOptions: the settings of a channel."""

from __future__ import annotations

from dataclasses import dataclass

from mcontroller.errors import ConfigError

__all__ = ["ChannelOptions"]


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """Settings of the channel between a controller and its worker processes.

    Raises:
        ConfigError: the range of ports is empty, or a number is out of range.
    """

    ports: tuple[int, int] | None = None
    """First and last TCP port that worker processes may listen on; None for any free port.

    A process has two for calls, and reserves one for the rendezvous of torch.distributed, which rank 0 uses."""
    inline_bytes: int = 256 * 1024
    """[bytes] Largest value that travels inside a message; larger ones go through Ray's object store.

    Measured with 4 ranks that all get and return a value, on 2 cores: 2.4 ms in messages and 13.6 ms through the store
    for 32 KiB, 5.5 and 13.2 ms for 256 KiB, 8.9 and 16.1 ms for 512 KiB, 23.8 and 16.3 ms for 1 MiB. A message is
    encrypted for each rank, and the store is written once, so more ranks with one value move the limit down."""

    def __post_init__(self) -> None:
        if self.ports is not None and not 0 < self.ports[0] < self.ports[1] - 1 < 65535:
            raise ConfigError(
                f"ports is {self.ports}; expected the first and the last of at least three TCP ports, 1 to 65535",
                key="ports",
                value=self.ports,
            )
        if not 0 <= self.inline_bytes <= 1 << 28:
            raise ConfigError(
                f"inline_bytes is {self.inline_bytes}; expected 0 to {1 << 28}",
                key="inline_bytes",
                value=self.inline_bytes,
            )
