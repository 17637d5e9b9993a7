"""Models of the Hugging Face hub by their names: ``Qwen/Qwen3-0.6B`` in place of a directory."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from mcontroller.errors import ConfigError
from workers.planning import is_planned

FILES = ("*.json", "*.model", "*.tiktoken", "*.jinja", "*.txt", "*.py", "LICENSE*")
"""The files of a model that are downloaded beside its weights: configuration, tokenizer and code, which is not run."""
WEIGHTS = ("*.safetensors", "*.gguf")
"""The files of weights that are downloaded; other formats are not."""


def is_hub_name(path: str | os.PathLike[str]) -> bool:
    """Return whether a path has the form ``organization/model``, and does not exist."""
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(path)) is not None and not Path(path).exists()


def local_directory(path: str | os.PathLike[str], key: str = "hf_path") -> str:
    """Return the path, or the directory of the hub's model of this name in the cache, downloaded if necessary.

    A planned run downloads no weights: see ``workers.planning``.

    Args:
        path: a directory; or ``organization/model``, which needs ``huggingface_hub`` and a network, or a cached model.
        key: the configuration key whose value it is, for error messages.

    Raises:
        ConfigError: there is no such directory, and no such model can be downloaded.
    """
    name = str(path)
    if Path(path).exists():
        return name
    text = f"{name!r} does not exist; {key} is a directory with config.json and the weights"
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        text += f". To download a model of the Hugging Face hub: hf download {name} --local-dir {name}"
    if not is_hub_name(name) or importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError(text, key=key, value=name)
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, allow_patterns=[*FILES, *(() if is_planned() else WEIGHTS)], etag_timeout=5)
    except (OSError, ValueError) as error:  # of the network, and of names that the hub does not have
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{text} (the download failed: {cause:.200})", key=key, value=name) from error
