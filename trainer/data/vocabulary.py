"""Whether a model was made with the vocabulary of another one, whose token ids it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mcontroller.config.imports import import_extra
from mcontroller.errors import ConfigError
from trainer.data.tokenizers import TextTokenizer

FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "tiktoken.model")
"""A directory with one of these has a tokenizer."""


def has_tokenizer(path: str) -> bool:
    """Return whether there is a tokenizer in the directory of a model."""
    return any(Path(path, name).is_file() for name in FILES)


def check_tokens(path: str, key: str, policy: TextTokenizer) -> None:
    """Raise ConfigError if the tokenizer in a model's directory has other ids than the policy's.

    Args:
        path: the directory.
        key: its key in the configuration.
        policy: the tokenizer of the policy; one that is not Hugging Face's is not compared.
    """
    transformers = import_extra("transformers", "hf", key)
    try:
        other: Any = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        text = f"transformers cannot load the tokenizer in {key} {path!r}: {' '.join(str(error).split())[:400]}"
        raise ConfigError(text, key=key, value=path) from error
    inner = getattr(policy, "tokenizer", None)
    different = _different_ids(inner, other) if isinstance(inner, transformers.PreTrainedTokenizerBase) else {}
    if different:
        shown, (of_policy, of_model) = next(iter(different.items()))
        raise ConfigError(
            f"{key} {path!r} has another vocabulary than the policy, whose token ids it gets: {len(different)} of "
            f"{policy.vocab_size} token ids differ, such as {shown}: {of_policy} for the policy, {of_model} for the "
            "model. Use a model with the same vocabulary; for a reward, a "
            "reward function can send texts to the model instead",
            key=key,
            value=path,
        )


def _different_ids(policy: Any, other: Any) -> dict[str, tuple[Any, Any]]:
    """Return the ids that are other tokens, or none: that may be if the token was added to the policy's vocabulary."""
    tokens, added = {number: token for token, number in other.get_vocab().items()}, policy.get_added_vocab()
    return {
        f"id {number}": (repr(token), repr(tokens.get(number)))
        for token, number in sorted(policy.get_vocab().items(), key=lambda item: item[1])
        if tokens.get(number, token if token in added else None) != token
    }
