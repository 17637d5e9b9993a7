"""Tokens of a conversation: of its prompt, and of what follows a message of the policy, whose tokens are recorded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mcontroller.errors import DataError
from trainer.data.tokenizers import TextTokenizer
from trainer.rollout.server.chat_requests import is_text

Messages = Sequence[Mapping[str, Any]]


def conversation_tokens(tokenizer: TextTokenizer, messages: Messages, tools: Sequence[Any]) -> list[int]:
    """Return the tokens that the policy's first message follows."""
    return tokenizer.encode(_rendered(tokenizer, messages, tools))


def tokens_after_reply(
    tokenizer: TextTokenizer, messages: Messages, reply: int, tools: Sequence[Any], stop: int | None
) -> list[int]:
    """Return the tokens between the policy's last message and its next one: the end of that message, and all after it.

    Args:
        tokenizer: its chat template renders the messages.
        messages: the whole conversation.
        reply: the index of the policy's last message.
        tools: of the conversation.
        stop: the stop token with which the policy ended its message, which the template writes as well; None: it did
            not end it.

    Raises:
        DataError: the template does not write the message once, as it is.
    """
    # The mark depends on every text of the conversation, so that none of them contains it.
    mark = hashlib.blake2b(json.dumps([messages, tools]).encode(), digest_size=16).hexdigest()
    marked = [*messages[:reply], {"role": "assistant", "content": mark}, *messages[reply + 1 :]]
    rendered = _rendered(tokenizer, marked, tools)
    if (count := rendered.count(mark)) != 1:
        raise DataError(
            f"the chat template writes message {reply}, which is the policy's, {count} times instead of once: what "
            "follows it cannot be found",
            index=reply,
            count=count,
        )
    after = rendered.partition(mark)[2]
    # Some tokenizers write a space in front of a text, but not of one that is in the middle.
    anchor, tokens = tokenizer.encode(mark), tokenizer.encode(mark + after)
    following = tokens[len(anchor) :] if tokens[: len(anchor)] == anchor else tokenizer.encode(after)
    if stop in following:
        end = following.index(stop)
        if not tokenizer.decode(following[:end]).strip():
            return following[end + 1 :]
    return following


def _rendered(tokenizer: TextTokenizer, messages: Messages, tools: Sequence[Any]) -> str:
    text = tokenizer.render(messages, **({"tools": list(tools)} if tools else {}))
    if not is_text(text):  # of JSON in the arguments of a call
        raise DataError("the conversation has half of a surrogate pair, which is no text")
    return text
