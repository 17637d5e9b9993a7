"""The answer to a request for chat completions, as in OpenAI's API: whole, and as a stream of events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.data.tokenizers import TextTokenizer
from trainer.rollout.server.chat_requests import ChatRequest
from trainer.rollout.server.sessions import Turn


class ChatCompletions:
    """A request for chat completions, and its answer. ``Responses`` and ``Messages`` have the same methods.

    Args:
        body: of the request.
        tokenizer: decodes tokens whose log-probabilities are returned.

    Attributes:
        request: what is to be generated.

    Raises:
        RequestError: a field is unknown or not supported, or a value has another type.
    """

    def __init__(self, body: Mapping[str, Any], tokenizer: TextTokenizer) -> None:
        self.request = ChatRequest.of(body)
        self._head = {"id": f"chatcmpl_{uuid.uuid4().hex}", "created": int(time.time()), "model": self.request.model}
        self._tokenizer, self._logged = tokenizer, dict.fromkeys(range(self.request.n), 0)

    def answer(self, turns: Sequence[Turn]) -> dict[str, Any]:
        """Return the body of the answer."""
        choices = [self._choice(turn, turn.reason, message=turn.message) for turn in turns]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": _usage(turns)}

    def begin(self, turns: Sequence[Turn]) -> str:
        """Return the first events of a stream."""
        return "".join(self._chunk(turn, role="assistant", content="") for turn in turns)

    def add_text(self, turn: Turn, text: str) -> str:
        """Return the events of a part of a turn's text."""
        return self._chunk(turn, content=text)

    def end(self, turns: Sequence[Turn]) -> str:
        """Return the events of tool calls and of the end, once all turns have ended."""
        events = []
        for turn in turns:
            if turn.calls:
                calls = [{"index": index, **call} for index, call in enumerate(turn.calls)]
                events.append(self._chunk(turn, tool_calls=calls))
            events.append(self._chunk(turn, turn.reason))
        if self.request.stream_options.include_usage:
            events.append(self._event(choices=[], usage=_usage(turns)))
        return "".join([*events, "data: [DONE]\n\n"])

    def error(self, body: Mapping[str, Any]) -> str:
        """Return the event for an error in the middle of a stream."""
        return event(body)

    def _chunk(self, turn: Turn, reason: str | None = None, **delta: Any) -> str:
        usage = {"usage": None} if self.request.stream_options.include_usage else {}
        return self._event(choices=[self._choice(turn, reason, delta=delta)], **usage)

    def _event(self, **fields: Any) -> str:
        return event({**self._head, "object": "chat.completion.chunk", **fields})

    def _choice(self, turn: Turn, reason: str | None, **said: Any) -> dict[str, Any]:
        """Return a choice, with the log-probabilities of the tokens that were not returned before."""
        logprobs = None
        if self.request.logprobs:
            start, self._logged[turn.index] = self._logged[turn.index], len(turn.tokens)
            content = []
            for token, log_prob in zip(turn.tokens[start:], turn.log_probs[start:], strict=True):
                text = self._tokenizer.decode([token])
                is_part = "\N{REPLACEMENT CHARACTER}" in text  # of a character: the tokenizer does not know its bytes
                read = None if is_part else [*text.encode()]
                content.append({"token": text, "logprob": log_prob, "bytes": read, "top_logprobs": []})
            logprobs = {"content": content, "refusal": None}
        return {"index": turn.index, **said, "finish_reason": reason, "logprobs": logprobs}


def event(data: Mapping[str, Any], name: str | None = None) -> str:
    """Return a server-sent event."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n"


def _usage(turns: Sequence[Turn]) -> dict[str, int]:
    prompt, completion = turns[0].prompt_tokens, sum(len(turn.tokens) for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
