"""A strict reader of configurations: dataclasses from files, mappings and overrides; no key is ignored."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mcontroller.errors import ConfigError

C = TypeVar("C")


def load_config(cls: type[C], *sources: Any, overrides: Iterable[str] = ()) -> C:
    """An instance of the dataclass ``cls`` from ``sources``, each over the one before, and ``overrides`` over all.

    A dataclass with fields that can be found elsewhere (a model's sizes in its checkpoint) has a static method
    ``find_fields(fields, missing, key)``: asked where fields are ``missing``, it gives values that stand below all
    sources; ``fields`` are the others, and ``key`` is the dotted prefix of all.

    Args:
        cls: a dataclass of scalars, sequences, mappings and further dataclasses.
        sources: paths of YAML files, mappings, or instances of dataclasses.
        overrides: ``"key.of.a.field=value"``, the value in YAML.

    Raises:
        ConfigError: a key that ``cls`` does not have (its close matches are in the message), a value of another
            type, or a field without a default that nothing sets; ``key`` is its dotted name.
    """
    layers = [_layer(source) for source in sources] + [_layer_of_overrides(list(overrides))]
    for layer in layers:
        given = typing.cast(dict[str, Any], OmegaConf.to_container(layer, resolve=False))
        for key, names in _unknown_keys(cls, given, ""):
            raise _unknown_key(key, names, cls)
    try:
        config = typing.cast(DictConfig, OmegaConf.merge(OmegaConf.structured(cls), *layers))
        if found := _found_fields(cls, config, ""):
            config = typing.cast(DictConfig, OmegaConf.merge(OmegaConf.structured(cls), found, *layers))
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise ConfigError(f"{cls.__name__} needs a value for {', '.join(missing)}", key=missing[0], keys=missing)
        return typing.cast(C, OmegaConf.to_object(config))
    except OmegaConfBaseException as error:
        key, reason = error.full_key or repr(error.key), str(error).splitlines()[0]
        raise ConfigError(f"{cls.__name__}: {key}: {reason}", key=key, value=error.value) from error


def _layer(source: Any) -> DictConfig:
    if isinstance(source, str | Path):
        path = Path(source)
        if not path.is_file():
            raise ConfigError(f"there is no configuration file {str(path)!r}", key=str(path), value=None)
        loaded = OmegaConf.load(path)
    else:
        is_instance = dataclasses.is_dataclass(source) and not isinstance(source, type)
        loaded = OmegaConf.create(dataclasses.asdict(source) if is_instance else source)
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"a configuration maps keys to values; {source!r} holds a list", key="", value=source)
    return loaded


def _layer_of_overrides(overrides: Sequence[str]) -> DictConfig:
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"the override {override!r} is not of the form key=value", key=override, value=None)
    return OmegaConf.from_dotlist(list(overrides))


def _found_fields(cls: type, config: DictConfig, prefix: str) -> dict[str, Any]:
    """What ``cls`` and the dataclasses in it find of the fields that nothing sets."""
    hints = typing.get_type_hints(cls)
    missing = [item.name for item in dataclasses.fields(cls) if OmegaConf.is_missing(config, item.name)]
    found: dict[str, Any] = {}
    present = [item.name for item in dataclasses.fields(cls) if item.name not in missing]
    for name in present:
        nested = _dataclass_of(hints[name])
        if nested is not None and isinstance(config[name], DictConfig):
            below = _found_fields(nested, config[name], f"{prefix}{name}.")
            found |= {name: below} if below else {}
    if missing and hasattr(cls, "find_fields"):
        found |= cls.find_fields({name: config[name] for name in present}, missing, prefix)
    return found


def _unknown_keys(cls: type, given: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, list[str]]]:
    """Every key of ``given`` that is no field of ``cls``, dotted, with the names that are fields there."""
    hints = typing.get_type_hints(cls)
    names = [item.name for item in dataclasses.fields(cls)]
    for key, value in given.items():
        if key not in names:
            yield f"{prefix}{key}", names
        elif (nested := _dataclass_of(hints[key])) is not None and isinstance(value, Mapping):
            yield from _unknown_keys(nested, value, f"{prefix}{key}.")


def _dataclass_of(hint: Any) -> type | None:
    """The dataclass that a field holds, itself or optionally; None where it holds something else."""
    options = typing.get_args(hint) or (hint,)
    return next((option for option in options if isinstance(option, type) and dataclasses.is_dataclass(option)), None)


def _unknown_key(key: str, names: list[str], cls: type) -> ConfigError:
    """The error for a dotted key whose last part is none of ``names``."""
    parent, _, last = key.rpartition(".")
    close = [f"{parent}.{name}".lstrip(".") for name in difflib.get_close_matches(last, names, n=3)]
    hint = f"did you mean {' or '.join(close)}?" if close else f"possible there: {', '.join(names)}"
    return ConfigError(f"{cls.__name__} has no key {key!r}; {hint}", key=key, value=None, close_matches=close)
