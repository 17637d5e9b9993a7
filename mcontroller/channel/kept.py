"""KeptResults: values that stay in the process that computed them until somebody asks for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

CallKey = tuple[bytes, int]
"""A call: its controller, and its number there."""

Reader = Callable[[Any], None]
"""Called with the result of a call, or with None if it has been released."""


@dataclass(slots=True)
class KeptResults:
    """The results of calls, by call. A reader that comes before the result waits. Safe for use by several threads."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _results: dict[CallKey, Any] = field(default_factory=dict)
    _readers: dict[CallKey, list[Reader]] = field(default_factory=dict)
    _released: dict[bytes, set[int]] = field(default_factory=dict)

    def put(self, key: CallKey, result: Any) -> None:
        """Keep a result until ``release``, and pass it to its readers; drop it if it was released before."""
        with self._lock:
            released = self._released.get(key[0], set())
            if key[1] in released:
                released.discard(key[1])
            else:
                self._results[key] = result
            readers = self._readers.pop(key, ())
        for read in readers:
            read(result)

    def read(self, key: CallKey, finished: bool, read: Reader) -> None:
        """Pass a result to ``read``, now or when it is there.

        Args:
            key: the call.
            finished: whether the call has ended; then a result that is not kept was released.
            read: the reader.
        """
        with self._lock:
            if key not in self._results and not finished:
                self._readers.setdefault(key, []).append(read)
                return
            result = self._results.get(key)
        read(result)

    def release(self, caller: bytes, numbers: Iterable[int], finished: int) -> None:
        """Drop results of a controller, also those to come.

        Args:
            caller: the controller.
            numbers: the calls.
            finished: the last call of this controller that has ended.
        """
        with self._lock:
            for number in numbers:
                if self._results.pop((caller, number), None) is None and number > finished:
                    self._released.setdefault(caller, set()).add(number)

    def release_all(self, caller: bytes) -> None:
        """Drop all results of a controller that has ended."""
        with self._lock:
            for key in [key for key in self._results if key[0] == caller]:
                del self._results[key]
            self._released.pop(caller, None)

    def __len__(self) -> int:
        return len(self._results)
