"""Range checks of configuration values; each raises ConfigError with the key, the value and the rule."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from numbers import Integral, Real

from mcontroller.errors import ConfigError


def check_finite(key: str, value: float) -> None:
    """Raise ConfigError for NaN and infinity."""
    if not math.isfinite(value):
        raise ConfigError(f"{key} is {value}; it must be a finite number", key=key, value=value)


def check_at_least(key: str, value: float, least: float) -> None:
    """Raise ConfigError unless ``value >= least``; NaN and infinity are rejected; so are fractions, of an int."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not value >= least:
        raise ConfigError(f"{key} is {value!r}; it must be at least {least}", key=key, value=value)
    check_finite(key, value)
    if isinstance(least, int) and not isinstance(value, Integral):
        raise ConfigError(f"{key} is {value}; it must be an integer of at least {least}", key=key, value=value)


def check_above(key: str, value: float, bound: float) -> None:
    """Raise ConfigError unless ``value > bound``; NaN and infinity are rejected."""
    if not value > bound:
        raise ConfigError(f"{key} is {value}; it must be more than {bound}", key=key, value=value)
    check_finite(key, value)


def check_between(key: str, value: float, least: float, most: float) -> None:
    """Raise ConfigError unless ``least <= value <= most``; NaN is rejected."""
    if not least <= value <= most:
        raise ConfigError(f"{key} is {value}; it must lie between {least} and {most}", key=key, value=value)


def check_one_of(key: str, value: str, possible: Iterable[str]) -> None:
    """Raise ConfigError unless ``value`` is one of ``possible``."""
    if value not in possible:
        raise ConfigError(f"{key} is {value!r}; possible: {', '.join(possible)}", key=key, value=value)


def close_names(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean a or b?"`` for the names in ``known`` that are similar; empty if there are none."""
    close = difflib.get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""
