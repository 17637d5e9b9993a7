"""``generation_config.json`` of a checkpoint: the tokens that end a response."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mcontroller.errors import ConfigError


def stop_tokens_of(path: str | Path) -> list[int]:
    """Return the tokens that end a response; none if the directory has no such file.

    Raises:
        ConfigError: the file is damaged, or a token is no number.
    """
    ids = _read(path).get("eos_token_id")
    tokens = ids if isinstance(ids, list) else [ids] if ids is not None else []
    if any(type(token) is not int or token < 0 for token in tokens):
        raise _wrong(path, "eos_token_id", ids, "token ids")
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
