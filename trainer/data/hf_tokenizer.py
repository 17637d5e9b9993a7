"""Tokenizers of Hugging Face, with their chat templates; whether a model has the vocabulary of another one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mcontroller.config.imports import import_extra
from mcontroller.errors import ConfigError, DataError
from mcontroller.files import is_lfs_pointer
from trainer.data.prompts import from_json
from trainer.data.tokenizers import TOKENIZERS, Message, TextTokenizer, TokenizerSource
from workers.weights.hf.config import stop_tokens_of

FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "tiktoken.model")
"""A directory with one of these has a tokenizer."""


@TOKENIZERS.register("huggingface")
class HuggingFaceTokenizer:
    """The tokenizer of a directory of Hugging Face. Needs the extra ``hf``.

    Without a pad token, the token that ends a text pads as well: attention masks cover the padding.

    Args:
        source: its directory.

    Raises:
        ConfigError: there is no tokenizer in the directory, or it has no token that ends a text.
    """

    def __init__(self, source: TokenizerSource) -> None:
        if source.path is None:
            raise ConfigError(
                "there is no tokenizer: set tokenizer.path to a directory of Hugging Face, or the model's hf_path, or "
                "register one and set tokenizer.kind",
                key="tokenizer.path",
            )
        if not Path(source.path).is_dir():
            raise ConfigError(f"tokenizer.path {source.path!r} is not a directory", key="tokenizer.path")
        self.tokenizer = _loaded(source.path, "tokenizer.path")
        names = {"tokenizer.json", *self.tokenizer.vocab_files_names.values()}
        if not any((Path(source.path) / name).is_file() for name in names):  # transformers makes one without tokens
            raise ConfigError(
                f"there is no tokenizer in {source.path!r}: it has none of {', '.join(sorted(names))}. Download these "
                "files of the model too, or set tokenizer.path to a directory that has them",
                key="tokenizer.path",
                value=source.path,
            )
        if self.tokenizer.eos_token_id is None:
            raise ConfigError(
                f"the tokenizer in {source.path!r} has no eos_token: set it in its tokenizer_config.json",
                key="tokenizer.path",
            )
        self.path, self.template_arguments = source.path, source.template_arguments
        others = [token for token in stop_tokens_of(source.path) if token != self.tokenizer.eos_token_id]
        self._stops = [int(self.tokenizer.eos_token_id), *others]

    @property
    def eos_token_id(self) -> int | list[int]:
        """Token that ends a response; several if ``generation_config.json`` has others, the tokenizer's own first."""
        return self._stops if len(self._stops) > 1 else self._stops[0]

    @property
    def pad_token_id(self) -> int:
        """Token that pads prompts and responses."""
        pad = self.tokenizer.pad_token_id
        return self._stops[0] if pad is None else int(pad)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, with added tokens."""
        return len(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens that the text does not contain."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def encode_after(self, before: str, text: str) -> list[int]:
        """Return the ids of a text that follows another one: some tokenizers put a space in front of a first text."""
        start, whole = self.encode(before), self.encode(before + text)
        return whole[len(start) :] if whole[: len(start)] == start else self.encode(text)

    @property
    def text_prefix(self) -> list[int]:
        """Ids that the tokenizer puts in front of a text, such as BOS."""
        whole, bare = self.tokenizer.encode("a"), self.encode("a")
        start = next(start for start in range(len(whole) + 1) if whole[start : start + len(bare)] == bare)
        return list(whole[:start])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def render(self, messages: Sequence[Message], **arguments: Any) -> str:
        """Return chat messages as the text that the model's answer follows; the template gets the other arguments.

        It is what ``apply_chat_template`` of transformers returns, with ``add_generation_prompt``, or, after a message
        of the assistant, with ``continue_final_message``.

        Raises:
            ConfigError: the tokenizer has no chat template.
            DataError: the template rejects the messages.
        """
        if self.tokenizer.chat_template is None:
            raise ConfigError(
                f"the prompts are chat messages, and the tokenizer in {self.path!r} has no chat template: use one of "
                "an instruction-tuned model, or prompts that are texts with data.chat_template=false",
                key="tokenizer.path",
                value=self.path,
            )
        chat, texts = _with_mappings(messages)
        if texts:  # some templates take the text of arguments, and others would encode it again, or reject it
            with contextlib.suppress(DataError):
                rendered = self._applied([{**message} for message in messages], arguments)
                if not any(json.dumps(text, ensure_ascii=False) in rendered for text in texts):
                    return rendered
        return self._applied(chat, arguments)

    def _applied(self, chat: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
        continues = bool(chat) and chat[-1].get("role") == "assistant"
        ends = {"add_generation_prompt": not continues, "continue_final_message": continues}
        try:
            rendered = self.tokenizer.apply_chat_template(
                chat, tokenize=False, **ends, **{**self.template_arguments, **arguments}
            )
        except Exception as error:  # a template can raise anything
            raise DataError(f"the chat template in {self.path!r} rejects {repr(chat)[:200]}: {error}") from error
        return str(rendered)

    def save(self, directory: Path) -> None:
        """Write the tokenizer into ``<directory>/tokenizer``."""
        self.tokenizer.save_pretrained(str(directory / "tokenizer"))


def _loaded(directory: str, key: str) -> Any:
    """Return the tokenizer in a directory.

    Args:
        directory: the directory.
        key: its key in the configuration.

    Raises:
        ConfigError: transformers cannot load it or is not installed, or one of the files is a pointer of Git LFS.
    """
    files = [file for file in Path(directory).iterdir() if file.is_file() and file.suffix != ".safetensors"]
    for path in sorted(files):
        if is_lfs_pointer(path):
            text = f"{str(path)!r} is a pointer of Git LFS, not the file: run `git lfs pull` in {directory!r}"
            raise ConfigError(text, key=key, value=directory)
    transformers = import_extra("transformers", "hf", key)
    try:
        return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damaged files raise anything: tokenizers has an exception without a class
        text = f"transformers cannot load the tokenizer in {key} {directory!r}: {' '.join(str(error).split())[:400]}"
        raise ConfigError(text, key=key, value=directory) from error


def has_tokenizer(directory: str) -> bool:
    """Return whether there is a tokenizer in the directory of a model."""
    return any(Path(directory, name).is_file() for name in FILES)


def check_tokens(directory: str, key: str, policy: TextTokenizer) -> None:
    """Raise ConfigError if the tokenizer in a model's directory has other ids than the policy's.

    Args:
        directory: the directory.
        key: its key in the configuration.
        policy: the tokenizer of the policy; one that is not Hugging Face's is not compared.
    """
    other = _loaded(directory, key)
    different = _different_ids(policy.tokenizer, other) if isinstance(policy, HuggingFaceTokenizer) else {}
    if different:
        shown, (of_policy, of_model) = next(iter(different.items()))
        raise ConfigError(
            f"{key} {directory!r} has another vocabulary than the policy, whose token ids it gets: {len(different)} of "
            f"{policy.vocab_size} token ids differ, such as {shown}: {of_policy} for the policy, {of_model} for the "
            "model. Use a model with the same vocabulary; for a reward, a "
            "reward function can send texts to the model instead",
            key=key,
            value=directory,
        )


def _different_ids(policy: Any, other: Any) -> dict[str, tuple[Any, Any]]:
    """Return the ids that are other tokens, or none: that may be if the token was added to the policy's vocabulary."""
    tokens, added = {number: token for token, number in other.get_vocab().items()}, policy.get_added_vocab()
    return {
        f"id {number}": (repr(token), repr(tokens.get(number)))
        for token, number in sorted(policy.get_vocab().items(), key=lambda item: item[1])
        if tokens.get(number, token if token in added else None) != token
    }


def _with_mappings(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return messages whose tool calls have mappings as arguments, and the texts in JSON that these were."""
    texts: list[str] = []

    def parsed(call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        changed = {}
        if isinstance(call.get("function"), Mapping):
            changed["function"] = parsed(call["function"])
        arguments = call.get("arguments")
        if isinstance(arguments, str) and isinstance(mapping := from_json(arguments), dict):
            texts.append(arguments)
            changed["arguments"] = mapping
        return {**call, **changed}

    chat = [
        {**message, "tool_calls": [parsed(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else {**message}
        for message in messages
    ]
    return chat, texts
