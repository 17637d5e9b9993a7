"""Tokens of a conversation: of its prompt, and of what follows a message of the policy, whose tokens are recorded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcontroller.errors import DataError
from trainer.data.tokenizers import TextTokenizer
from trainer.rollout.server.chat_requests import is_text

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class PrefixChange:
    """A text that the chat template writes differently after the conversation has gone on.

    Attributes:
        reply: the index of the policy's message that follows the text.
        recorded: the text when the policy wrote the message, whose tokens the trajectory has.
        rendered: the text that the template writes there now.
    """

    reply: int
    recorded: str
    rendered: str


def texts_around_replies(
    tokenizer: TextTokenizer, messages: Messages, replies: Sequence[int], tools: Sequence[Any]
) -> list[str]:
    """Return the texts that the chat template writes before, between and after the policy's messages.

    Args:
        tokenizer: its chat template renders the messages.
        messages: the whole conversation.
        replies: the indices of the policy's messages.
        tools: of the conversation.

    Raises:
        DataError: the template does not write a message of the policy once, as it is; fields ``index`` and ``count``.
    """
    # The marks depend on every text of the conversation, so that none of them contains one.
    digest = hashlib.blake2b(json.dumps([messages, tools]).encode(), digest_size=16).hexdigest()
    marks = {reply: f"{digest}-{reply}-" for reply in replies}
    marked = [
        {"role": "assistant", "content": marks[index]} if index in marks else message
        for index, message in enumerate(messages)
    ]
    after = tokenizer.render(marked, **({"tools": list(tools)} if tools else {}))
    if not is_text(after):  # of JSON in the arguments of a call
        raise DataError("the conversation has half of a surrogate pair, which is no text")
    texts = []
    for reply, mark in marks.items():
        if (count := after.count(mark)) != 1:
            raise DataError(
                f"the chat template writes message {reply}, which is the policy's, {count} times instead of once: what "
                "follows it cannot be found",
                index=reply,
                count=count,
            )
        before, _, after = after.partition(mark)
        texts.append(before)
    return [*texts, after]


def tokens_after_reply(tokenizer: TextTokenizer, text: str, stop: int | None) -> list[int]:
    """Return the tokens between the policy's last message and its next one.

    Args:
        tokenizer: encodes the text.
        text: what the template writes after the message: its end, and all that follows.
        stop: the stop token with which the policy ended the message, which the template writes as well; None: it did
            not end it.
    """
    # Some tokenizers write a space in front of a text, but not of one that is in the middle.
    before = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    start, tokens = tokenizer.encode(before), tokenizer.encode(before + text)
    following = tokens[len(start) :] if tokens[: len(start)] == start else tokenizer.encode(text)
    if stop in following:
        end = following.index(stop)
        if not tokenizer.decode(following[:end]).strip():
            return following[end + 1 :]
    return following
