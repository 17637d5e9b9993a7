"""Strict reader of configurations: dataclasses from files, mappings and overrides; every key must exist."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue, OmegaConfBaseException

from mcontroller.config.fields import is_text, mapped_config, nested_config, structure_of, tuple_length, unknown_field
from mcontroller.errors import ConfigError, MControllerError

C = TypeVar("C")
T = TypeVar("T")

_defaults_by_class: dict[type, DictConfig] = {}


def load_config(cls: type[C], *sources: Any, overrides: Iterable[str] = ()) -> C:
    """Return an instance of the dataclass ``cls``: later sources replace earlier ones, ``overrides`` replace all.

    A dataclass can define a static method ``find_fields(fields, missing, key)`` to read fields that are not given from
    elsewhere (a model's sizes from its checkpoint). It is called with the values of all fields that have one, the names
    of those that have neither a value nor a default, and the dotted prefix of their keys; the values that it returns
    have a lower priority than every source, and a higher one than defaults.

    Args:
        cls: a dataclass of scalars, sequences, mappings and nested dataclasses.
        sources: paths of YAML files, mappings, or instances of dataclasses.
        overrides: ``"key.of.a.field=value"``, the value in YAML.

    Raises:
        ConfigError: a key that ``cls`` does not have (the message contains close matches), a value of another type,
            or a field without a default and without a value; ``key`` is its dotted name. Several errors are reported
            together, a line for each.

    Examples:
        >>> load_config(ActorConfig, "actor.yaml", overrides=["optim.lr=1e-6"])
    """
    errors = CollectedErrors()
    layers, removed = _layers(sources, overrides), set[str]()
    for layer in layers:  # a value below another one that is wrong is taken in its place
        for error, path in list(_misfits(cls, _plain(layer), ())):
            errors.errors.append(error)
            _remove(layer, path)
    given = _merged(layers)
    while True:
        sections = _Sections(cls, removed)
        config: C | None = sections.built(given)
        errors.errors += sections.errors.errors
        rejected = [str(getattr(error, "key", "")) for error in sections.errors.errors]
        names = {name for key in rejected for name in _remove_named(given, key)}
        if not names:
            errors.raise_any()
            assert config is not None
            return config
        removed |= names


def given_values(*sources: Any, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Return the values of all sources and overrides as they are, without types, defaults and resolved interpolations.

    Args:
        sources: as of ``load_config``.
        overrides: as of ``load_config``.

    Raises:
        ConfigError: a source or an override cannot be read.
    """
    return _plain(_merged(_layers(sources, overrides)))


def is_referred_to(name: str, values: Mapping[str, Any]) -> bool:
    """Return whether another value refers to one: whether it changes with it.

    Args:
        name: of the value.
        values: of all sources, see ``given_values``.
    """
    paths = [path for path in _leaves(values, ()) if path[0] != name]
    now, changed = (OmegaConf.create({**values, name: value}) for value in (values.get(name), "another value"))
    return any(_resolved(now, path) != _resolved(changed, path) for path in paths)


def _resolved(config: DictConfig, path: Sequence[Any]) -> Any:
    """Return the value at the end of a path of keys; the class of the error if it cannot be resolved."""
    node: Any = config
    try:
        for key in path:
            node = node[key]
        return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    except OmegaConfBaseException as error:
        return type(error)


def completed_section(cls: type[Any], values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a section as ``load_config`` completes it: with defaults, and with what ``find_fields`` supplies.

    Args:
        cls: the dataclass of the whole.
        values: the values of all sources, see ``given_values``.
        name: the field of the section.

    Returns:
        The values of the section. Empty if they cannot be completed, which ``load_config`` reports.
    """
    config = _Sections(cls, set()).completed(OmegaConf.create(dict(values)))
    try:
        return {} if config is None else typing.cast(dict[str, Any], OmegaConf.to_container(config[name], resolve=True))
    except OmegaConfBaseException:
        return {}


class _Sections:
    """Builds a dataclass after the dataclasses of its fields, and goes on where one cannot be built.

    Args:
        cls: the dataclass.
        removed: the keys of rejected values, which are not reported as missing.

    Attributes:
        errors: the errors, with whole keys.
    """

    def __init__(self, cls: type[Any], removed: Collection[str]) -> None:
        self._cls, self._removed = cls, removed
        self.errors = CollectedErrors()

    def built(self, given: DictConfig) -> Any:
        """Return the instance with these values and defaults; None if a section cannot be built."""
        config = self.completed(given)
        if config is None:
            return None
        missing = list[str]()
        with contextlib.suppress(OmegaConfBaseException):  # of a reference, which the section reports
            missing = sorted(OmegaConf.missing_keys(config))
        names = [name for name in missing if name not in self._removed]
        if names and not self.errors.errors:  # an error of find_fields says what is missing
            text = f"{self._cls.__name__} needs a value for {', '.join(names)}"
            self.errors.errors.append(ConfigError(text, key=names[0], value=None, keys=names))
        return self._section(self._cls, config, ())

    def completed(self, given: DictConfig) -> DictConfig | None:
        """Return the values with their types, defaults, and what ``find_fields`` supplies; None if one does not fit."""
        with self._collected():
            config = _typed(self._cls, given)
            fields = self.errors.attempt(lambda: self._found_fields(self._cls, config, ()))
            return _typed(self._cls, fields, given) if fields else config
        return None

    def _section(self, cls: type[Any], config: DictConfig, path: tuple[str, ...]) -> Any:
        """Return the instance of a section; None if it cannot be built."""
        values = dict[str, Any]()
        for item in dataclasses.fields(cls):
            here = *path, item.name
            with self._collected(here):
                value = config[item.name]
                nested, mapped = nested_config(cls, item.name), mapped_config(cls, item.name)
                if nested is not None and isinstance(value, DictConfig):
                    value = self._section(nested, value, here)
                    if value is None:
                        continue
                elif mapped is not None and isinstance(value, DictConfig):
                    value = {name: self._section(mapped, value[name], (*here, str(name))) for name in value}
                    if None in value.values():
                        continue
                elif OmegaConf.is_config(value):
                    value = OmegaConf.to_object(value)
                values[item.name] = value
        if len(values) < len(dataclasses.fields(cls)):
            return None
        try:
            return cls(**values)
        except MControllerError as error:
            self.errors.errors.append(with_whole_key(error, self._cls, path))
            return None

    def _found_fields(self, cls: type[Any], config: DictConfig, path: tuple[str, ...]) -> dict[str, Any]:
        """Return the values that ``find_fields`` of ``cls`` and of its nested dataclasses supply."""
        missing = [item.name for item in dataclasses.fields(cls) if OmegaConf.is_missing(config, item.name)]
        fields, known = dict[str, Any](), dict[str, Any]()
        for name in (item.name for item in dataclasses.fields(cls) if item.name not in missing):
            with contextlib.suppress(OmegaConfBaseException):  # such as a reference to what is yet to be supplied
                known[name] = config[name]
            nested = nested_config(cls, name)
            if nested is not None and isinstance(known.get(name), DictConfig):
                below = self._found_fields(nested, known[name], (*path, name))
                fields |= {name: below} if below else {}
        if hasattr(cls, "find_fields"):
            prefix = "".join(f"{key}." for key in path)
            fields |= cls.find_fields(dict(known), missing, prefix)
        return fields

    @contextlib.contextmanager
    def _collected(self, path: Sequence[str] = ()) -> Iterator[None]:
        """Collect an error of OmegaConf, which may not know its key; a missing value has been reported."""
        try:
            yield
        except (MissingMandatoryValue, InterpolationToMissingValueError):
            pass
        except OmegaConfBaseException as error:
            key, reason = error.full_key or ".".join(path) or str(error.key), str(error).splitlines()[0]
            self.errors.errors.append(ConfigError(f"{key}: {reason}", key=key, value=error.value))
        except TypeError as error:  # of OmegaConf, for a mapping in place of a list
            text = f"{self._cls.__name__}: a value has another structure: {error}"
            self.errors.errors.append(ConfigError(text, key="", value=None))


def with_whole_key(error: MControllerError, whole: type[Any], section: Sequence[str]) -> MControllerError:
    """Return an error of a section with the whole key in its message: a section knows the last parts of its keys alone.

    Args:
        error: an error of this project.
        whole: the dataclass of the whole configuration.
        section: the keys that lead to the section.
    """
    if not section:
        return error
    key, path = str(getattr(error, "key", "")), ".".join(section)
    head, _, rest = key.partition(".")
    candidates = [*([f"{path}.{rest}"] if rest and section[-1].endswith(head) else []), f"{path}.{key}", key]
    found = next((candidate for candidate in candidates if _is_field(whole, candidate.split("."))), None)
    if found == key or (found or path) in error.message:
        return error
    text = error.message.removeprefix(key) if found is not None else error.message
    named = f"{path}: {error.message}" if text == error.message else f"{found}{text}"
    return type(error)(named, **error.fields | ({} if found is None else {"key": found}))


def _is_field(cls: type[Any] | None, path: Sequence[str]) -> bool:
    """Return whether a path of keys leads to a field, or into a mapping."""
    if cls is None or path[0] not in {item.name for item in dataclasses.fields(cls)}:
        return False
    if len(path) == 1 or (structure_of(cls, path[0]) is dict and nested_config(cls, path[0]) is None):
        return True
    return _is_field(nested_config(cls, path[0]), path[1:])


def _merged(layers: Sequence[DictConfig]) -> DictConfig:
    """Return the values of all layers, without types and defaults."""
    try:
        return typing.cast(DictConfig, OmegaConf.merge(*layers))
    except (OmegaConfBaseException, TypeError) as error:
        raise ConfigError(f"the configuration cannot be merged: {_line(error)}", key="", value=None) from error


def _plain(config: DictConfig) -> dict[str, Any]:
    return typing.cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))


def _typed(cls: type[Any], *layers: Any) -> DictConfig:
    return typing.cast(DictConfig, OmegaConf.merge(_defaults(cls), *layers))


def _defaults(cls: type[Any]) -> DictConfig:
    """Return the fields of a dataclass with their types and defaults; ``merge`` copies it."""
    if cls not in _defaults_by_class:
        _defaults_by_class[cls] = OmegaConf.structured(cls)
    return _defaults_by_class[cls]


def _remove_named(config: DictConfig, key: str) -> list[str]:
    """Remove the values of a rejected key, so that other errors are found, and return their names.

    The key of a check may lack the first parts of the dotted name.
    """
    names = {".".join(map(str, path)): path for path in _leaves(_plain(config), ())}
    removed = [name for name in names if key and (name == key or name.endswith(f".{key}"))]
    return [name for name in removed if _remove(config, names[name])]


def _leaves(values: Mapping[Any, Any], path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each value; a key of a file may contain dots itself."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key)


def _remove(layer: DictConfig, path: Sequence[Any]) -> bool:
    """Remove the value at the end of a path of keys; return whether it was there."""
    node: Any = layer
    for key in path[:-1]:
        node = node._get_node(key)
    there = path[-1] in node
    if there:
        del node[path[-1]]
    return there


def _layers(sources: Iterable[Any], overrides: Iterable[str]) -> list[DictConfig]:
    return [*map(_layer, sources), _layer_of_overrides(list(overrides))]


def _layer(source: Any) -> DictConfig:
    if isinstance(source, str | Path):
        return read_yaml(source)
    is_instance = dataclasses.is_dataclass(source) and not isinstance(source, type)
    try:
        loaded = OmegaConf.create(literal(dataclasses.asdict(source)) if is_instance else source)
    except OmegaConfBaseException as error:
        text = f"a value of the configuration cannot be read: {_line(error)}"
        raise ConfigError(text, key=error.full_key or "", value=None) from error
    return _mapping(loaded, source)


def literal(value: Any) -> Any:
    """Return a value whose texts OmegaConf reads as they are: ``${`` begins no reference."""
    if isinstance(value, Mapping):
        return {key: literal(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [literal(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def read_yaml(path: str | Path) -> DictConfig:
    """Return the content of a YAML file, whose values can refer to each other.

    Raises:
        ConfigError: there is no such file, or it is not YAML or not a mapping; with the line.
    """
    path = Path(path)
    if not path.is_file():
        problem = "is not a file" if path.exists() else "does not exist"
        raise ConfigError(f"configuration file {str(path)!r} {problem}; pass a YAML file", key=str(path), value=None)
    try:
        loaded = OmegaConf.load(io.StringIO(path.read_bytes().decode()))
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, TypeError, RecursionError) as error:
        text = f"the configuration file {str(path)!r} cannot be read as YAML: {_line(error)}"
        raise ConfigError(text, key=str(path), value=None) from error
    return _mapping(loaded, path)


def _mapping(loaded: Any, source: Any) -> DictConfig:
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{str(source)!r} is not a mapping of keys to values", key="", value=source)
    return loaded


def _layer_of_overrides(overrides: Sequence[str]) -> DictConfig:
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"the override {override!r} is not of the form key.of.a.field=value", key=key, value=None)
    try:
        return OmegaConf.from_dotlist(list(overrides))
    except (yaml.YAMLError, OmegaConfBaseException, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"an override of {list(overrides)} cannot be read: {_line(error)}", key="overrides"
        ) from error


def _line(error: Exception) -> str:
    """Return an error of several lines in one, with the place that YAML names."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _misfits(
    cls: type[Any], values: Mapping[Any, Any], path: tuple[Any, ...]
) -> Iterator[tuple[ConfigError, tuple[Any, ...]]]:
    """Yield the error of every key that is no field, or has a value of another structure, and the keys to it."""
    names = [item.name for item in dataclasses.fields(cls)]
    for key, value in values.items():
        here = (*path, key)
        if key not in names:
            yield unknown_field(cls, str(key), "".join(f"{part}." for part in path)), here
        elif error := (
            _wrong_structure(structure_of(cls, key), value, here)
            or _wrong_text(cls, key, value, here)
            or _wrong_length(cls, key, value, here)
        ):
            yield error, here
        elif (nested := nested_config(cls, key)) is not None and isinstance(value, Mapping):
            yield from _misfits(nested, value, here)
        elif (mapped := mapped_config(cls, key)) is not None and isinstance(value, Mapping):
            for name, member in value.items():
                if error := _wrong_structure(dict, member, (*here, name)):
                    yield error, (*here, name)
                elif isinstance(member, Mapping):
                    yield from _misfits(mapped, member, (*here, name))


def _wrong_structure(expected: type | None, value: Any, path: tuple[Any, ...]) -> ConfigError | None:
    """Return the error of a value that is no mapping or list where one is expected; None and references are."""
    if expected is None or value is None or isinstance(value, expected) or str(value).startswith("${"):
        return None
    key = ".".join(map(str, path))
    text = "a mapping of keys to values" if expected is dict else f"a list, such as [{value}]"
    return ConfigError(f"{key} is {value!r}; expected {text}", key=key, value=value)


def _wrong_text(cls: type[Any], name: str, value: Any, path: tuple[Any, ...]) -> ConfigError | None:
    """Return the error of a number in place of a text: YAML does not keep how it was written, such as 2026_01_01."""
    number = next((entry for entry in (value if isinstance(value, list) else [value]) if isinstance(entry, Real)), None)
    if number is None or not is_text(cls, name):
        return None
    key = ".".join(map(str, path))
    text = f"{key} is {number!r} in YAML; expected text: put it in quotes, and on a command line \"{key}='...'\""
    return ConfigError(text, key=key, value=value)


def _wrong_length(cls: type[Any], name: str, value: Any, path: tuple[Any, ...]) -> ConfigError | None:
    """Return the error of a list in place of a tuple of another length."""
    length = tuple_length(cls, name)
    if length is None or not isinstance(value, list) or len(value) == length:
        return None
    key = ".".join(map(str, path))
    return ConfigError(f"{key} is {value!r}; expected {length} values", key=key, value=value)


class CollectedErrors:
    """Errors that are collected and then raised together.

    Attributes:
        errors: the errors so far.
    """

    def __init__(self) -> None:
        self.errors: list[MControllerError] = []

    def attempt(self, action: Callable[[], T]) -> T | None:
        """Return the result of ``action``; None if it raises an error of this project, which is collected.

        Of an error that ``raise_any`` has raised for several, these are collected.
        """
        try:
            return action()
        except MControllerError as error:
            self.errors += error.fields.get("errors", [error])
            return None

    def raise_any(self) -> None:
        """Raise the error if there is one; if there are several, one ConfigError with a line for each.

        An error that names the key of an earlier one follows from the value in its place, and is left out.

        Raises:
            ConfigError: there are several errors, which are its field ``errors``; or the one is a ConfigError.
        """
        by_line: dict[str, MControllerError] = {}
        for error in self.errors:
            keys = [str(getattr(earlier, "key", "")) for earlier in by_line.values()]
            if not any("." in key and re.search(rf"(?<![\w.]){re.escape(key)}(?!\w|\.\w)", str(error)) for key in keys):
                by_line[f"{type(error).__name__}: {error}"] = error
        lines, errors = list(by_line), list(by_line.values())
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise ConfigError(
                "\n  ".join([f"the configuration has {len(lines)} errors:", *lines]),
                key=getattr(errors[0], "key", ""),
                value=None,
                errors=errors,
            )
