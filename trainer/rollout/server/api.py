"""The chat completions of OpenAI's API, and what the other APIs have in common with them."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.data.tokenizers import TextTokenizer
from trainer.rollout.server.chat_requests import ChatRequest
from trainer.rollout.server.sessions import Turn


class ChatCompletions:
    """A request for chat completions, and its answer: ``POST /v1/chat/completions``.

    Args:
        body: of the request.
        tokenizer: decodes tokens whose log-probabilities are asked for.

    Attributes:
        request: what is to be generated.

    Raises:
        RequestError: a field is unknown or not supported, or a value has another type.
    """

    prefix = "chatcmpl"

    def __init__(self, body: Mapping[str, Any], tokenizer: TextTokenizer) -> None:
        self.request = ChatRequest.of(self.translated(body))
        self.id, self.created = self.new_id(self.prefix), int(time.time())
        self._tokenizer, self._logged = tokenizer, dict.fromkeys(range(self.request.n), 0)

    def translated(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the request for chat completions that a body stands for."""
        return body

    @staticmethod
    def new_id(prefix: str) -> str:
        """Return an id of the answer, or of a part."""
        return f"{prefix}_{uuid.uuid4().hex}"

    def answer(self, turns: Sequence[Turn]) -> dict[str, Any]:
        """Return the body of the answer."""
        choices = []
        for turn in turns:
            said = {"message": turn.message, "finish_reason": turn.reason, "logprobs": self._logprobs(turn)}
            choices.append({"index": turn.index, **said})
        head = {"id": self.id, "object": "chat.completion", "created": self.created, "model": self.request.model}
        return {**head, "choices": choices, "usage": _usage(turns)}

    def start(self, turns: Sequence[Turn]) -> Iterator[str]:
        """Return the first events of a stream."""
        for turn in turns:
            yield self._chunk({"role": "assistant", "content": ""}, turn)

    def delta(self, turn: Turn, text: str) -> Iterator[str]:
        """Return the events for a text that has arrived."""
        yield self._chunk({"content": text}, turn)

    def turn_end(self, turn: Turn) -> Iterator[str]:
        """Return the events for the tool calls and the end of a turn."""
        if turn.calls:
            yield self._chunk({"tool_calls": [{"index": at, **call} for at, call in enumerate(turn.calls)]}, turn)
        yield self._chunk({}, turn, turn.reason)

    def end(self, turns: Sequence[Turn]) -> Iterator[str]:
        """Return the last events of a stream."""
        if self.request.include_usage:
            yield self._event({**self._head(), "choices": [], "usage": _usage(turns)})
        yield "data: [DONE]\n\n"

    def error(self, body: Mapping[str, Any]) -> str:
        """Return the event for an error in the middle of a stream."""
        return self._event(body)

    def _chunk(self, delta: Mapping[str, Any], turn: Turn, reason: str | None = None) -> str:
        logprobs = self._logprobs(turn)
        choice = {"index": turn.index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        usage = {"usage": None} if self.request.include_usage else {}
        return self._event({**self._head(), "choices": [choice], **usage})

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.request.model,
        }

    def _logprobs(self, turn: Turn) -> dict[str, Any] | None:
        """Return the log-probabilities of the tokens that were not returned before."""
        if not self.request.logprobs:
            return None
        start, self._logged[turn.index] = self._logged[turn.index], len(turn.tokens)
        content = []
        for token, log_prob in zip(turn.tokens[start:], turn.log_probs[start:], strict=True):
            text = self._tokenizer.decode([token])
            content.append({"token": text, "logprob": log_prob, "bytes": [*text.encode()], "top_logprobs": []})
        return {"content": content, "refusal": None}

    @staticmethod
    def _event(value: Mapping[str, Any]) -> str:
        return f"data: {json.dumps(value)}\n\n"


def _usage(turns: Sequence[Turn]) -> dict[str, int]:
    prompt, completion = turns[0].prompt_tokens, sum(len(turn.tokens) for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
