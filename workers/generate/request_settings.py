"""The settings with which a request is sampled, checked before they join those of other requests."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping
from numbers import Integral, Real
from typing import Any

from mcontroller.config.checks import close_names
from mcontroller.errors import DataError

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


def checked_sampling(request: Mapping[str, Any], limits: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a request, as keyword arguments of ``TrajectoryRollout.submit``.

    None is as good as left out. ``temperature`` 0 and ``top_p`` 0, which OpenAI allows, take the most probable token:
    both become ``do_sample=False``.

    Args:
        request: names of ``OF_REQUESTS`` and values, as a client or an episode has sent them.
        limits: ``generation_limits`` of the workers.

    Raises:
        DataError: a name is unknown, a value has another type or is out of range, or the workers do not say at which
            temperature they score a request that has none, and this one has; fields ``field`` and ``value``.
    """
    checked: dict[str, Any] = {}
    for name, value in request.items():
        if name not in OF_REQUESTS:
            raise DataError(
                f"a request has the setting {name!r}{close_names(str(name), OF_REQUESTS)}; possible: "
                + ", ".join(OF_REQUESTS),
                field=name,
                value=value,
            )
        if value is None:
            continue
        is_zero = isinstance(value, Real) and not isinstance(value, bool) and value == 0
        if is_zero and name in ("temperature", "top_p"):
            checked["do_sample"] = False
            continue
        setting = checked_setting(name, value)
        if setting is None:
            raise DataError(
                f"{name} of a request is {_shown(value)}; expected {SETTINGS[name][2]}", field=name, value=value
            )
        checked.setdefault(name, setting)
    if "temperature" in checked and "temperature" not in limits:
        raise DataError(
            "temperature of a request cannot be scored: generation_limits of the workers has no temperature, which "
            "the other requests are scored at. Add it there, or leave it out",
            field="temperature",
            value=checked["temperature"],
        )
    return checked


def checked_token_ids(name: str, given: Any, vocab_size: int) -> array[int]:
    """Return token ids of a request.

    Args:
        name: of what they are, for the error.
        given: several token ids, as a client or an episode has sent them; also of numpy or torch.
        vocab_size: token ids are less than this.

    Raises:
        DataError: they are no collection of integers, or not in the vocabulary; fields ``field`` and ``token``.
    """
    plain = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(plain, Collection) or isinstance(plain, str | bytes | Mapping):
        raise DataError(f"{name} of a request is {type(plain).__name__}; expected token ids", field=name)
    for token in plain:
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise DataError(f"{name} of a request has {_shown(token)}; expected token ids", field=name, token=token)
        if not 0 <= int(token) < vocab_size:
            raise DataError(
                f"submit: token {_shown(token)} is outside of the vocabulary, 0 to {vocab_size - 1}",
                field=name,
                token=token,
            )
    return array("q", plain)


def _shown(value: Any) -> str:
    """Return the text of a value for an error; Python writes no number of more than 4,300 digits."""
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than 200 bits"
    return repr(value)[:60]
