"""The interface of tokenizers, and those that a configuration chooses by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from mcontroller.config.fields import strict_fields
from mcontroller.config.registry import Registry
from mcontroller.errors import ConfigError

Message = Mapping[str, Any]
"""A chat message: ``{"role": "user", "content": "..."}``; a message of the assistant may have ``tool_calls``."""
TOKENIZERS: Registry[Callable[[TokenizerSource], TextTokenizer]] = Registry("tokenizer", key="tokenizer.kind")
"""Tokenizers by the name that a configuration uses; ``TOKENIZERS.register`` adds one."""


class Tokenizer(Protocol):
    """The attributes of a tokenizer that the trainer reads."""

    @property
    def eos_token_id(self) -> int | list[int]:
        """Token that ends a response, or several."""

    @property
    def pad_token_id(self) -> int:
        """Token that pads prompts and responses."""


class TextTokenizer(Tokenizer, Protocol):
    """Texts to ids and back."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens that the text does not contain."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""

    def render(self, messages: Sequence[Message], **arguments: Any) -> str:
        """Return chat messages as the text that the model's answer follows; the template gets the other arguments.

        A message of the assistant at the end is continued: no other turn follows it.

        Raises:
            ConfigError: the tokenizer has no chat template.
            DataError: it rejects the messages.
        """

    def save(self, directory: Path) -> None:
        """Write the tokenizer into ``tokenizer`` of a run's directory, from where exports copy its files.

        A tokenizer without files writes nothing.
        """


@runtime_checkable
class PrefixingTokenizer(Protocol):
    """The optional attribute of a tokenizer that puts tokens in front of a text, such as BOS."""

    @property
    def text_prefix(self) -> list[int]:
        """Ids in front of a prompt that is a text. ``encode`` leaves them out; chat templates contain their own."""


@runtime_checkable
class ContinuingTokenizer(Protocol):
    """The optional method of a tokenizer whose tokens of a text depend on whether it is the beginning."""

    def encode_after(self, before: str, text: str) -> list[int]:
        """Return the ids of a text that follows another one."""


@strict_fields
@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """The tokenizer."""

    kind: str = "huggingface"
    """Name of the implementation: huggingface, or one that you registered."""
    path: str | None = None
    """Directory of its files. None: the model's ``hf_path``."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as ``enable_thinking: false``, or ``tools``, a list of JSON schemas."""

    def __post_init__(self) -> None:
        known = {"tokenize", "add_generation_prompt", "continue_final_message", "conversation"}
        reserved = sorted(self.chat_template_kwargs.keys() & known)
        if reserved:
            raise ConfigError(
                f"tokenizer.chat_template_kwargs has {', '.join(reserved)}, which every prompt has already: leave out",
                key="tokenizer.chat_template_kwargs",
                value=self.chat_template_kwargs,
            )


class TokenizerSource:
    """What a tokenizer can be made from.

    Args:
        path: see ``path``.
        texts: returns prompts and answers of the problems, for a tokenizer that is made from them.
        template_arguments: see ``template_arguments``.

    Attributes:
        texts: as passed.
        read: the names of the properties that were read.
    """

    def __init__(
        self,
        path: str | None,
        texts: Callable[[], tuple[Iterable[str], Iterable[str]]],
        template_arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.texts, self.read = texts, set[str]()
        self._path, self._template_arguments = path, template_arguments

    @property
    def path(self) -> str | None:
        """The directory of its files, if there is one."""
        self.read.add("path")
        return self._path

    @property
    def template_arguments(self) -> Mapping[str, Any]:
        """Arguments of the chat template."""
        self.read.add("template_arguments")
        return self._template_arguments


def special_tokens(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the tokens of a tokenizer that generation reads from ``meta_info``."""
    return {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}


def stop_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a tokenizer that end a response."""
    stop = tokenizer.eos_token_id
    return [stop] if isinstance(stop, int) else list(stop)
