"""Classes whose members have names, like those of an enum, and which can be given more of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mcontroller.errors import DispatchError

__all__ = ["NamedMembers"]


class NamedMembers(type):
    """A class whose members are looked up like those of an enum, and which can be given more of them by name."""

    members: dict[str, Any]

    def register(cls, name: str, member: Any = None) -> Any:
        """Adds a member of that name and gives it; DispatchError where the name is taken or is no identifier."""
        if not name.isidentifier() or name in cls.members or hasattr(cls, name):
            raise DispatchError(
                f"{cls.__name__} cannot take the name {name!r}: it must be a new identifier, not one of "
                f"{', '.join(cls.members)}",
                name=name,
            )
        cls.members[name] = cls.new_member(name, member)
        return cls.members[name]

    def remove(cls, name: str) -> Any:
        """Takes out a member that was added by name, and gives it."""
        cls[name]
        return cls.members.pop(name)

    def new_member(cls, name: str, member: Any) -> Any:
        raise NotImplementedError

    def __getitem__(cls, name: str) -> Any:
        if name not in cls.members:
            raise DispatchError(
                f"{cls.__name__} has no {name!r}; it has {', '.join(cls.members)}. Add one with "
                f"{cls.__name__}.register({name!r})",
                name=name,
            )
        return cls.members[name]

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_") or name not in cls.members:
            raise AttributeError(f"{cls.__name__} has no {name!r}; it has {', '.join(cls.members)}")
        return cls.members[name]

    def __iter__(cls) -> Iterator[Any]:
        return iter(cls.members.values())

    def __len__(cls) -> int:
        return len(cls.members)

    def __contains__(cls, member: object) -> bool:
        return member in cls.members or member in cls.members.values()

    def __dir__(cls) -> list[str]:
        return [*super().__dir__(), *cls.members]
