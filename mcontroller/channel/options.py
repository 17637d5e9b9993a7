"""ChannelOptions: the settings of a channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mcontroller.errors import ConfigError
from parallel_state.axes import is_count


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """Settings of the channel between a controller and its worker processes.

    Raises:
        ConfigError: the range of ports is empty, or a value is of another type or out of range.
    """

    ports: tuple[int, int] | None = None
    """First and last TCP port that worker processes may listen on; None for any free port.

    A process has two for calls, and reserves one for the rendezvous of torch.distributed, which rank 0 uses."""
    inline_bytes: int = 256 * 1024
    """[bytes] Largest value that travels inside a message; larger ones go through Ray's object store.

    Measured with 4 ranks of the controller's machine that all get and return a value, on 2 cores: 1.6 ms in messages
    and 7.2 ms through the store for 64 KiB, 2.1 and 6.2 ms for 256 KiB, 5.3 and 7.2 ms for 1 MiB, 19 and 11 ms for
    4 MiB. To another machine, a message is encrypted for each rank, while the store is written once: there the times
    were equal between 512 KiB and 1 MiB, and more ranks with one value move the limit down."""

    report_after: float | None = 60.0
    """[s] Log which rank waits for which in a call that has had no answer for so long; None: only with ``CallTimeout``.

    It is logged once, and again when the ranks wait for something else. If none waits in a collective, the stacks of
    the late ranks are logged if they are the same after twice as long again."""

    def __post_init__(self) -> None:
        ports = self.ports
        if ports is not None and not (_is_pair_of_counts(ports) and ports[0] < ports[1] - 1 < 65535):
            raise ConfigError(
                f"ports is {ports}; expected the first and the last of at least three TCP ports, 1 to 65535",
                key="ports",
                value=self.ports,
            )
        seconds = self.report_after
        if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
            raise ConfigError(
                f"report_after is {seconds!r}; expected a number of seconds above 0, or None",
                key="report_after",
                value=seconds,
            )


def _is_pair_of_counts(ports: Any) -> bool:
    return isinstance(ports, Sequence) and len(ports) == 2 and all(map(is_count, ports))
