"""``generation_config.json`` of a checkpoint: the tokens that end a response, and how its authors sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mcontroller.errors import ConfigError

__all__ = ["sampling_of", "stop_tokens_of"]

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_of(path: str | Path) -> dict[str, float]:
    """Return the fields of ``RolloutConfig`` that the file sets; none if the directory has no such file.

    Raises:
        ConfigError: the file is damaged, or one of the values is no number.
    """
    found = {name: value for name, value in _read(path).items() if name in _SAMPLING and value is not None}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(path, name, value, "a number")
    return found


def stop_tokens_of(path: str | Path) -> list[int]:
    """Return the tokens that end a response; none if the directory has no such file.

    Raises:
        ConfigError: the file is damaged, or a token is no number.
    """
    found = _read(path).get("eos_token_id")
    tokens = found if isinstance(found, list) else [found] if found is not None else []
    if any(type(token) is not int or token < 0 for token in tokens):
        raise _wrong(path, "eos_token_id", found, "token ids")
    return tokens


def _read(path: str | Path) -> dict[str, Any]:
    file = Path(path) / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged: {error}", key="hf_path", value=str(path)) from error
    if not isinstance(content, dict):
        text = f"{file} is damaged: it contains {type(content).__name__}, expected an object"
        raise ConfigError(text, key="hf_path", value=str(path))
    return content


def _wrong(path: str | Path, name: str, value: Any, expected: str) -> ConfigError:
    text = f"{Path(path) / 'generation_config.json'}: {name} is {value!r}; expected {expected}"
    return ConfigError(text, key=name, value=value)
