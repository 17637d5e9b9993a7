"""The settings with which a request is sampled, checked before they join those of other requests."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping
from numbers import Integral, Real
from typing import Any

from mcontroller.config.checks import close_names
from mcontroller.errors import DataError
from workers.config.sampling import OF_REQUESTS, SETTINGS, checked_setting


def checked_sampling(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a request, as keyword arguments of ``TrajectoryRollout.submit``.

    None is as good as left out. ``temperature`` 0 and ``top_p`` 0, which OpenAI allows, take the most probable token:
    both become ``do_sample=False``.

    Args:
        request: names of ``OF_REQUESTS`` and values, as a client or an episode has sent them.

    Raises:
        DataError: a name is unknown, or a value has another type or is out of range; fields ``field`` and ``value``.
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
