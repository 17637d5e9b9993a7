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
    """A conversation that the chat template writes differently after it has gone on.

    Attributes:
        reply: the index of the policy's last message.
        recorded: the text of the tokens that the trajectory has.
        rendered: the text that the template writes now.
    """

    reply: int
    recorded: str
    rendered: str

    def excerpts(self, most: int = 400) -> tuple[str, str]:
        """Return both texts from shortly before the place where they differ, at most so many characters of each."""
        pairs = enumerate(zip(self.recorded, self.rendered, strict=False))
        start = max(0, next((place for place, (ours, theirs) in pairs if ours != theirs), 0) - most // 4)
        return self.recorded[start : start + most], self.rendered[start : start + most]


def rendered_text(tokenizer: TextTokenizer, messages: Messages, tools: Sequence[Any]) -> str:
    """Return the text that the chat template writes for messages, up to the policy's next one.

    Raises:
        DataError: the template rejects the messages.
    """
    # Many templates take only a text as the content.
    given = ({name: value for name, value in message.items() if value is not None} for message in messages)
    text = tokenizer.render([{"content": "", **message} for message in given], **({"tools": [*tools]} if tools else {}))
    try:
        text.encode()
    except UnicodeEncodeError as error:  # of JSON in the arguments of a call
        raise DataError("the conversation has half of a surrogate pair, which is no text") from error
    return text


def prefix_change(
    tokenizer: TextTokenizer, messages: Messages, tools: Sequence[Any], reply: int, recorded: Sequence[int]
) -> PrefixChange | None:
    """Return how the recorded tokens of a conversation differ from what the chat template writes, except in spaces.

    Args:
        tokenizer: its chat template renders the messages.
        messages: the whole conversation.
        tools: of the conversation.
        reply: the index of the policy's last message.
        recorded: the token ids of prompt and response.
    """
    ours = tokenizer.decode(recorded)
    theirs = tokenizer.decode(tokenizer.encode(rendered_text(tokenizer, messages, tools)))
    return None if "".join(ours.split()) == "".join(theirs.split()) else PrefixChange(reply, ours, theirs)


def text_after_reply(
    tokenizer: TextTokenizer, messages: Messages, reply: int, tools: Sequence[Any], *, keeps_calls: bool = False
) -> str:
    """Return the text that the chat template writes after a message of the policy.

    Args:
        tokenizer: its chat template renders the messages.
        messages: the whole conversation.
        reply: the index of the message.
        tools: of the conversation.
        keeps_calls: for templates that reject results of tools without calls before them: the text after a message with
            calls then begins within the last of these.

    Raises:
        DataError: the template rejects the messages, or does not write the message once, as it is; then it has fields
            ``index`` and ``count``.
    """
    # The mark depends on every text of the conversation, so that none of them contains it.
    mark = hashlib.blake2b(json.dumps([messages, tools]).encode(), digest_size=16).hexdigest()
    marked = [*messages[:reply], _marked(messages[reply], mark, keeps_calls), *messages[reply + 1 :]]
    _, *after = rendered_text(tokenizer, marked, tools).split(mark)
    if len(after) != 1:
        raise DataError(
            f"the chat template writes message {reply}, which is the policy's, {len(after)} times instead of once, so "
            "that what follows it cannot be found",
            index=reply,
            count=len(after),
        )
    return after[0]


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
