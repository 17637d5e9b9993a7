"""Field checks of configuration dataclasses, the same for Python calls, files and overrides.

A configuration is a frozen dataclass under ``@strict_fields``. An unknown field, a missing one, or a mapping where a
nested dataclass is expected raises ConfigError with the fix, instead of the TypeError or AttributeError of Python.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from mcontroller.errors import ConfigError

C = TypeVar("C")
_SWITCHES = "switches"
"""Key of the metadata of a field: by the name of another field, a value, and whether the field is off with it."""


def strict_fields(cls: type[C]) -> type[C]:
    """Decorate a dataclass so that its constructor rejects wrong fields with a ConfigError that contains the fix.

    So are values of fields that another field switches off: see ``unused_if``. A dataclass may have a class variable
    ``field_hints``: a mapping from names that users mistake for fields to a hint for each.

    Args:
        cls: the dataclass; its constructor is replaced.

    Returns:
        The same class.

    Examples:
        >>> @strict_fields
        ... @dataclass(frozen=True, slots=True)
        ... class OptimConfig:
        ...     lr: float = 1e-5
        >>> OptimConfig(lrr=1)
        ConfigError: OptimConfig has no field 'lrr'; did you mean lr?
    """
    init: Any = cls.__init__
    fields = dataclasses.fields(typing.cast(type[Any], cls))
    names = [field.name for field in fields]
    required = [field.name for field in fields if _is_required(field)]

    @functools.wraps(init)
    def __init__(self: C, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in names:
                raise unknown_field(cls, name)
        values = dict(zip(names, args, strict=False)) | kwargs
        missing = [name for name in required if name not in values]
        if missing:
            raise ConfigError(f"{cls.__name__} needs a value for {', '.join(missing)}", key=missing[0], keys=missing)
        _check_nested(cls, values)
        init(self, *args, **kwargs)
        _check_switched_off(self)

    setattr(cls, "__init__", __init__)  # noqa: B010  # mypy rejects the assignment to a method
    return cls


def unknown_field(cls: type, key: str, prefix: str = "") -> ConfigError:
    """Return the error for a field that ``cls`` does not have.

    The message contains the first of these that exists: the hint of ``cls`` for this name, the nested fields of the
    same name, close matches, the names of all fields.

    Args:
        cls: the dataclass.
        key: the name that is not a field.
        prefix: the dotted key of ``cls`` in the whole configuration, with a dot at the end.
    """
    names = [field.name for field in dataclasses.fields(cls)]
    nested = [path for path in _nested_names(cls) if path.rpartition(".")[2] == key]
    close = [f"{prefix}{name}" for name in nested or difflib.get_close_matches(key, names, n=3)]
    hints: Mapping[str, str] = getattr(cls, "field_hints", {})
    if key in hints:
        hint = hints[key]
    elif close:
        hint = f"did you mean {' or '.join(close)}?"
    else:
        hint = f"its fields are {', '.join(names)}"
    location = f" (key {prefix}{key})" if prefix else ""
    text = f"{cls.__name__} has no field {key!r}{location}; {hint}"
    return ConfigError(text, key=f"{prefix}{key}", value=None, close_matches=close)


def nested_config(cls: type, name: str) -> type | None:
    """Return the dataclass that is the type of the field ``name``, optional or not; None for other types."""
    return _dataclass_among(_possible_types(cls, name))


def mapped_config(cls: type, name: str) -> type | None:
    """Return the dataclass of the values of the field ``name`` if it is a mapping of names to dataclasses, or None."""
    hint = _hints(cls)[name]
    return _dataclass_among(typing.get_args(hint)[1:]) if typing.get_origin(hint) is dict else None


def structure_of(cls: type, name: str) -> type | None:
    """Return ``dict`` or ``list`` if values of the field ``name`` are mappings or lists; None for other types."""
    possible = [kind for kind in _possible_types(cls, name) if kind is not types.NoneType]
    kinds = {dict if dataclasses.is_dataclass(kind) else typing.get_origin(kind) for kind in possible}
    return next((kind for kind in (dict, list) if kinds == {kind}), None)


def tuple_length(cls: type, name: str) -> int | None:
    """Return how many values the field ``name`` has if it is a tuple of fixed length; None for other types."""
    hint = _hints(cls)[name]
    values = typing.get_args(hint) if typing.get_origin(hint) is tuple else ()
    return len(values) if values and Ellipsis not in values else None


def is_text(cls: type, name: str) -> bool:
    """Return whether values of the field ``name``, or the entries of its lists, are strings and nothing else."""
    kinds = {kind for option in _possible_types(cls, name) for kind in typing.get_args(option) or (option,)}
    return kinds - {types.NoneType, ...} == {str}


def changed_fields(config: Any, usual: Any = None, prefix: str = "") -> dict[str, Any]:
    """Return the default of each field that has another value, by dotted key; ``"required"`` without a default.

    Args:
        config: an instance of a dataclass; of nested ones, the fields are compared.
        usual: the default of ``config`` as a whole; None: the defaults of its class.
        prefix: the dotted key of ``config``, with a dot at the end.
    """
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        default = _default_of(field) if usual is None else getattr(usual, field.name)
        value, key = getattr(config, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            changes |= changed_fields(value, default if type(default) is type(value) else None, f"{key}.")
        elif (list(value) if isinstance(value, tuple) else value) != (default := _plain(default)):
            changes[key] = default
    return changes


def unused_if(default: Any, /, **switches: Any) -> Any:
    """Return a field that nothing reads if one of the switches has the given value.

    A value that is not the default is a mistake then about what is on, and ``strict_fields`` rejects it.

    Args:
        default: the default of the field, or a class whose instances are the default.
        switches: other fields of the same dataclass, and the values with which the field has no effect.

    Examples:
        >>> @strict_fields
        ... @dataclass(frozen=True, slots=True)
        ... class WarmUpConfig:
        ...     steps: int = 0
        ...     batch_size: int = unused_if(256, steps=0)
        >>> WarmUpConfig(batch_size=8)
        ConfigError: batch_size is 8: leave it out; it has no effect with steps=0
    """
    return _switched(default, {name: (value, True) for name, value in switches.items()})


def used_if(default: Any, /, **switches: Any) -> Any:
    """Return a field that is read only if each of the switches has the given value; see ``unused_if``."""
    return _switched(default, {name: (value, False) for name, value in switches.items()})


def _switched(default: Any, switches: Mapping[str, tuple[Any, bool]]) -> Any:
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata={_SWITCHES: switches})
    return dataclasses.field(default=default, metadata={_SWITCHES: switches})


def _check_switched_off(config: Any) -> None:
    """Raise ConfigError if a field is set that another one switches off."""
    for field in dataclasses.fields(config):
        for switch, (state, is_off) in field.metadata.get(_SWITCHES, {}).items():
            if (getattr(config, switch) == state) is is_off:
                check_unused(config, (field.name,), "", _reason(switch, state, is_off))


def reasons_without_effect(field: dataclasses.Field[Any]) -> list[str]:
    """Return when nothing reads a field, such as ``with steps=0``: see ``unused_if``."""
    return [_reason(switch, *value) for switch, value in field.metadata.get(_SWITCHES, {}).items()]


def _reason(switch: str, state: Any, is_off: bool) -> str:
    shown = {"None": "null", "True": "true", "False": "false", "()": "[]"}.get(str(state), state)
    return f"{'with' if is_off else 'unless'} {switch}={shown}"


def check_unused(config: Any, names: Iterable[str], prefix: str, reason: str) -> None:
    """Check that fields which nothing reads have their defaults: another value is a mistake about what is on.

    Args:
        config: an instance of a dataclass.
        names: of the fields.
        prefix: the dotted key of ``config``, with a dot at the end.
        reason: continues "has no effect": what is off, and how it is switched on.

    Raises:
        ConfigError: a field has another value; ``key`` names it.
    """
    defaults = {field.name: _default_of(field) for field in dataclasses.fields(config)}
    for name in names:
        value = getattr(config, name)
        if value != defaults[name]:
            key = f"{prefix}{name}"
            shown = "set" if dataclasses.is_dataclass(value) else repr(value)
            raise ConfigError(f"{key} is {shown}: leave it out; it has no effect {reason}", key=key, value=value)


def _plain(default: Any) -> Any:
    """Return a default as a file has it: mappings for dataclasses, lists for tuples."""
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        return dataclasses.asdict(default)
    return list(default) if isinstance(default, tuple) else default


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return "required" if field.default is dataclasses.MISSING else field.default


def _dataclass_among(options: Iterable[Any]) -> type | None:
    return next((option for option in options if isinstance(option, type) and dataclasses.is_dataclass(option)), None)


def _possible_types(cls: type, name: str) -> tuple[Any, ...]:
    """Return the members of the union that is the type of the field ``name``, or its type."""
    hint = _hints(cls)[name]
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


@functools.lru_cache(maxsize=256)
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _nested_names(cls: type, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields of the dataclasses in ``cls``."""
    for field in dataclasses.fields(cls):
        nested = nested_config(cls, field.name)
        if nested is not None:
            yield from (f"{prefix}{field.name}.{inner.name}" for inner in dataclasses.fields(nested))
            yield from _nested_names(nested, f"{prefix}{field.name}.")


def _check_nested(cls: type, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        expected = nested_config(cls, name) if isinstance(value, Mapping | str) else None
        if expected is not None:
            raise ConfigError(
                f"{cls.__name__}: {name} is a {type(value).__name__}; expected {expected.__name__}: write "
                f"{name}={expected.__name__}(...), or load_config({cls.__name__}, {{...}}) for nested mappings",
                key=name,
                value=value,
            )
