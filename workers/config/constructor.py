"""Check of a role worker's constructor arguments, in the controller's process."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from mcontroller.errors import ConfigError

__all__ = ["check_constructor"]


def check_constructor(cls: Any, config_class: type | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check that ``cls(*args, **kwargs)`` binds, and that its argument ``config`` is a ``config_class``.

    Raises:
        ConfigError: an argument is missing or unknown, or ``config`` has another type; the message contains the fix.
    """
    signature = inspect.signature(cls.__init__)
    try:
        bound = signature.bind(None, *args, **kwargs).arguments
    except TypeError as error:
        names = ", ".join(list(signature.parameters)[1:])
        raise ConfigError(f"{cls.__name__}: {error}; its arguments are {names}", key=cls.__name__) from error
    config = bound.get("config")
    if config_class is None or "config" not in bound or isinstance(config, config_class):
        return
    name, kind = config_class.__name__, type(config).__name__
    made = f"load_config({name}, {{...}})" if isinstance(config, Mapping) else f"{name}(...)"
    raise ConfigError(
        f"{cls.__name__}: config is of type {kind}; expected {name}: write config={made}, or set "
        f"{cls.__name__}.config_class if its configuration has another type",
        key="config",
        value=config,
    )
