"""The key-value store of the ranks, which torch.distributed uses for its rendezvous."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, Protocol

import torch.distributed as dist

__all__ = ["KeyWait", "SimulatedStore", "StoreOwner"]


class KeyWait:
    """A rank that waits for keys of the store.

    Attributes:
        keys: The keys.
        line: The line of the program that waits.
        done: Whether all of them are set.
    """

    def __init__(self, keys: Sequence[str], line: Any) -> None:
        self.keys = tuple(keys)
        self.line = line
        self.done = False

    def __str__(self) -> str:
        return f"store.wait({list(self.keys)})"


class StoreOwner(Protocol):
    """What the store needs of a simulation."""

    values: dict[str, bytes]

    def wait_for_keys(self, keys: Sequence[str]) -> None:
        """Let other ranks run until all keys are set."""

    def keys_changed(self) -> None:
        """Let ranks go on whose keys are set."""


class SimulatedStore(dist.Store):
    """A store in this process; a key that is not set lets other ranks run until it is."""

    def __init__(self, owner: StoreOwner) -> None:
        super().__init__()
        self._owner = owner

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        self._owner.values[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._owner.keys_changed()

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait until it is set."""
        self._owner.wait_for_keys([key])
        return self._owner.values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return it."""
        total = int(self._owner.values.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a key if it has the expected value, and return its value."""
        wanted = expected.encode() if isinstance(expected, str) else bytes(expected)
        if self._owner.values.get(key, b"") == wanted:
            self.set(key, desired)
        return self._owner.values.get(key, wanted)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all keys are set; there is no timeout."""
        self._owner.wait_for_keys(keys)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        return all(key in self._owner.values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether it was set."""
        return self._owner.values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return the number of keys."""
        return len(self._owner.values)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Do nothing: there is no timeout."""
