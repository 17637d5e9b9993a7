"""The settings of sampling: the type and the range of each, in a configuration, a batch and a request."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from mcontroller.errors import ConfigError

SETTINGS: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "temperature": (float, lambda value: 1e-6 <= value <= 1e6, "a number from 1e-6 to 1e6"),
    "top_p": (float, lambda value: 0.0 < value <= 1.0, "a number above 0 and at most 1"),
    "top_k": (int, lambda value: 0 <= value < 1 << 31, "an integer from 0, which keeps all tokens, to 2^31 - 1"),
    "min_p": (float, lambda value: 0.0 <= value <= 1.0, "a number from 0 to 1"),
    "repetition_penalty": (float, lambda value: 1e-6 <= value <= 1e6, "a number from 1e-6 to 1e6"),
    "do_sample": (bool, lambda value: True, "true or false"),
    "n": (int, lambda value: value >= 1, "an integer of at least 1"),
    "seed": (int, lambda value: -(1 << 63) <= value < 1 << 63, "an integer of 64 bits, signed"),
    "response_length": (int, lambda value: value >= 1, "an integer of at least 1"),
    "max_tokens": (int, lambda value: value >= 1, "an integer of at least 1"),
}
"""Of every setting its type, a rule for values of the type, and both in words."""

OF_BATCHES = tuple(name for name in SETTINGS if name != "max_tokens")
"""The settings that a batch may have, which are fields of ``RolloutConfig``."""

OF_REQUESTS = tuple(name for name in SETTINGS if name != "n")
"""The settings that a request may have."""


def checked_setting(name: str, value: Any) -> Any:
    """Return the value of a setting as a number of Python; None if its type or value is wrong.

    Args:
        name: of ``SETTINGS``.
        value: of any type.
    """
    kind, rule, _ = SETTINGS[name]
    if isinstance(value, bool) or kind is bool:
        return value if isinstance(value, bool) and kind is bool else None
    is_of_kind = isinstance(value, Real if kind is float else Integral)
    return kind(value) if is_of_kind and rule(value) else None


def check_setting(key: str, name: str, value: Any, shown: str = "") -> Any:
    """Return the value of a setting as ``checked_setting`` does.

    Args:
        key: for the error.
        name: of ``SETTINGS``.
        value: of any type.
        shown: what the error calls it, if that is not the key.

    Raises:
        ConfigError: its type or value is wrong.
    """
    checked = checked_setting(name, value)
    if checked is None:
        kind, _, rule = SETTINGS[name]
        greedy = "; for greedy decoding set do_sample=False" if name == "temperature" else ""
        raise ConfigError(
            f"{shown or key} is {value!r}; expected {kind.__name__}, {rule}{greedy}", key=key, value=value
        )
    return checked
