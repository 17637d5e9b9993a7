"""Classes with named members, like those of an enum, that accept more members at run time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mcontroller.errors import DispatchError

__all__ = ["NamedMembers"]


class NamedMembers(type):
    """The metaclass of ``Dispatch`` and ``Execute``: look members up as in an enum, and register more by name.

    The members of a class are its class attributes of type ``of``. ``members`` maps their names to them. A member that
    is registered later is not known to type checkers as an attribute: use the value that ``register`` returns.

    Example:
        >>> class Colors(metaclass=NamedMembers, of=str):
        ...     RED: ClassVar[str] = "#f00"
        >>> Colors.RED, Colors["RED"]
        ('#f00', '#f00')
    """

    members: dict[str, Any]
    member_type: type

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], *, of: type) -> NamedMembers:
        """Create a class and move its attributes of type ``of`` into ``members``."""
        members = {key: value for key, value in namespace.items() if isinstance(value, of)}
        cls = super().__new__(mcs, name, bases, {key: namespace[key] for key in namespace if key not in members})
        cls.members = members
        cls.member_type = of
        return cls

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], *, of: type) -> None:
        super().__init__(name, bases, namespace)

    def register(cls, name: str, member: Any = None) -> Any:
        """Add a member under ``name`` and return it.

        Raises:
            DispatchError: the name is taken or is not an identifier.
        """
        if not name.isidentifier() or name in cls.members or hasattr(cls, name):
            raise DispatchError(
                f"{cls.__name__} cannot use the name {name!r}: it must be a new identifier, not one of "
                f"{', '.join(cls.members)}",
                name=name,
            )
        cls.members[name] = cls.new_member(name, member)
        return cls.members[name]

    def remove(cls, name: str) -> Any:
        """Remove a member and return it.

        Raises:
            DispatchError: there is no member of this name.
        """
        member = cls[name]
        del cls.members[name]
        return member

    def from_name(cls, name: str) -> Any:
        """Return the member of this name in upper or lower case; None if there is none."""
        return cls.members.get(name, cls.members.get(name.upper()))

    def names(cls) -> list[str]:
        """Return the names of all members."""
        return list(cls.members)

    def values(cls) -> list[Any]:
        """Return all members."""
        return list(cls.members.values())

    def new_member(cls, name: str, member: Any) -> Any:
        """Return the member that ``register(name, member)`` stores; every class must define it."""
        raise NotImplementedError

    def __getitem__(cls, name: str) -> Any:
        if name not in cls.members:
            raise DispatchError(
                f"{cls.__name__} has no {name!r}; it has {', '.join(cls.members)}. Add one with "
                f"{cls.__name__}.register({name!r})",
                name=name,
            )
        return cls.members[name]

    if not TYPE_CHECKING:  # a type checker reports attributes that the class does not declare

        def __getattr__(cls, name):
            """Return a member; the error for an unknown name lists all members."""
            if name.startswith("_") or name not in cls.members:
                raise AttributeError(f"{cls.__name__} has no {name!r}; it has {', '.join(cls.members)}")
            return cls.members[name]

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.member_type)

    def __iter__(cls) -> Iterator[Any]:
        return iter(cls.members.values())

    def __len__(cls) -> int:
        return len(cls.members)

    def __contains__(cls, member: object) -> bool:
        return member in cls.members or member in cls.members.values()

    def __dir__(cls) -> list[str]:
        return [*super().__dir__(), *cls.members]
