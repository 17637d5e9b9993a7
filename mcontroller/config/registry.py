"""Registries: implementations that a configuration chooses by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from mcontroller.errors import ConfigError

T = TypeVar("T")
U = TypeVar("U")


class Registry(Mapping[str, T], Generic[T]):
    """A read-only mapping of names to implementations; ``register`` adds one with a decorator.

    Examples:
        >>> POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss", key="policy_loss")
        >>> @POLICY_LOSSES.register("mine")
        ... def mine(log_probs, old_log_probs, advantages): ...

    Args:
        kind: the name of one entry in error messages, such as ``"advantage estimator"``.
        key: the configuration key whose value is a name of this registry, for error messages.
    """

    def __init__(self, kind: str, *, key: str) -> None:
        self.kind = kind
        self.key = key
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[U], U]:
        """Return a decorator that adds the decorated object under ``name`` and returns it unchanged.

        Raises:
            ConfigError: another implementation has this name already.
        """

        def add(entry: U) -> U:
            self.add(name, entry)  # type: ignore[arg-type]  # the registry's own decorators narrow U to T
            return entry

        return add

    def add(self, name: str, entry: T) -> None:
        """Add ``entry`` under ``name``.

        Raises:
            ConfigError: another implementation has this name already.
        """
        if self._entries.get(name, entry) != entry:
            raise ConfigError(f"{self.kind} {name!r} is registered already: choose another name", key=name)
        self._entries[name] = entry

    def get_or_raise(self, name: str, key: str | None = None) -> T:
        """Return the implementation called ``name``.

        Args:
            name: the name.
            key: the configuration key to report; None for the key of this registry.

        Raises:
            ConfigError: there is none; the message lists the names, and ``close_matches`` lists similar ones.
        """
        if name not in self._entries:
            close = difflib.get_close_matches(str(name), self._entries, n=3)
            hint = f"did you mean {' or '.join(close)}? " if close else ""
            raise ConfigError(
                f"{key or self.key} is {name!r}, and there is no such {self.kind}: {hint}"
                f"registered are {', '.join(self._entries) or 'none'}; name a module that registers it in imports",
                key=key or self.key,
                value=name,
                close_matches=close,
            )
        return self._entries[name]

    def __getitem__(self, name: str) -> T:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Registry({self.kind!r}: {', '.join(self._entries)})"
