"""Tokens of a conversation: of its prompt, and of what follows a message of the policy, whose tokens are recorded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcontroller.errors import DataError
from trainer.data.tokenizers import TextTokenizer

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
    tokenizer: TextTokenizer,
    messages: Messages,
    replies: Sequence[int],
    tools: Sequence[Any],
    *,
    keeps_calls: bool = False,
) -> list[str]:
    """Return the texts that the chat template writes before, between and after the policy's messages.

    Args:
        tokenizer: its chat template renders the messages.
        messages: the whole conversation.
        replies: the indices of the policy's messages.
        tools: of the conversation.
        keeps_calls: for templates that reject results of tools without calls before them: the text after a message with
            calls then begins within the last of these.

    Raises:
        DataError: the template rejects the messages, or does not write a message of the policy once, as it is; then
            it has fields ``index`` and ``count``.
    """
    # The marks depend on every text of the conversation, so that none of them contains one.
    digest = hashlib.blake2b(json.dumps([messages, tools]).encode(), digest_size=16).hexdigest()
    marks = {reply: f"{digest}-{reply}-" for reply in replies}
    marked = [
        {"content": "", **_given(_marked(message, marks[index], keeps_calls) if index in marks else message)}
        for index, message in enumerate(messages)
    ]
    after = tokenizer.render(marked, **({"tools": list(tools)} if tools else {}))
    try:
        after.encode()
    except UnicodeEncodeError as error:  # of JSON in the arguments of a call
        raise DataError("the conversation has half of a surrogate pair, which is no text") from error
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


def _given(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without fields that are null: many templates take only a text as the content."""
    return {name: value for name, value in message.items() if value is not None}


def _marked(message: Mapping[str, Any], mark: str, keeps_calls: bool) -> dict[str, Any]:
    """Return a message of the policy with a mark in place of what it says."""
    calls = message.get("tool_calls") if keeps_calls else None
    if not calls:
        return {"role": "assistant", "content": mark}
    last = {**calls[-1], "function": {**calls[-1]["function"], "name": mark}}
    return {**message, "tool_calls": [*calls[:-1], last]}


def tokens_after_reply(
    tokenizer: TextTokenizer, text: str, stop: int | None, *, is_within_call: bool = False
) -> list[int]:
    """Return the tokens between the policy's last message and its next one.

    Args:
        tokenizer: encodes the text.
        text: what the template writes after the message: its end, and all that follows.
        stop: the stop token with which the policy ended the message, which the template writes as well; None: it did
            not end it.
        is_within_call: whether the text begins within a call: what follows the stop token is returned.

    Raises:
        DataError: the template does not write the stop token after the message or call.
    """
    # Some tokenizers write a space in front of a text, but not of one that is in the middle.
    before = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    start, tokens = tokenizer.encode(before), tokenizer.encode(before + text)
    following = tokens[len(start) :] if tokens[: len(start)] == start else tokenizer.encode(text)
    if stop is None and not is_within_call:
        return following
    if stop in following:
        end = following.index(stop)
        if is_within_call or not tokenizer.decode(following[:end]).strip():
            return following[end + 1 :]
    raise DataError(f"the chat template writes no stop token where the policy ended its message: {text[:200]!r}")
