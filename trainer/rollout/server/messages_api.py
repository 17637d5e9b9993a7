"""The Messages API of Anthropic, ``POST /v1/messages``: text and tool calls."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from trainer.data.tokenizers import TextTokenizer
from trainer.rollout.server.chat_api import event
from trainer.rollout.server.chat_requests import ApiRequest, ChatRequest, Fields, Limit, Name, Stops, Text
from trainer.rollout.server.sessions import Turn

_TEXT = {"type": "text", "text": ""}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _Block(Fields):
    ignored = ("cache_control", "citations", "is_error", "caller", "signature", "data", "thinking")
    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str = ""
    id: Name | None = None
    name: Name | None = None
    input: Any = None
    tool_use_id: Name | None = None
    content: Text = ""


class _Message(Fields):
    role: Literal["user", "assistant"]
    content: Annotated[
        list[_Block],
        BeforeValidator(lambda content: [{"type": "text", "text": content}] if isinstance(content, str) else content),
    ]


class _Tool(Fields):
    ignored = ("cache_control", "strict")
    type: Literal["custom"] = "custom"
    name: Name
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class MessagesRequest(ApiRequest):
    """A request of the Messages API."""

    ignored = ("cache_control", "container", "context_management", "metadata", "service_tier")
    neutral: ClassVar[Mapping[str, Any]] = {"thinking": {"type": "disabled"}, "tool_choice": {"type": "auto"}}
    max_tokens: Limit
    messages: list[_Message]
    system: Text | None = None
    stop_sequences: Stops = Field(default=[])
    tools: list[_Tool] = Field(default=[])

    def chat(self) -> ChatRequest:
        """Return the request for chat completions that this one stands for."""
        same = self.model_dump(exclude_none=True, exclude={"messages", "system", "stop_sequences", "tools"})
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages += [chat for message in self.messages for chat in _chat_messages(message)]
        tools = []
        for tool in self.tools:
            function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
            tools.append({"type": "function", "function": function})
        return ChatRequest.of({**same, "messages": messages, "tools": tools, "stop": self.stop_sequences})


def _chat_messages(message: _Message) -> Iterator[dict[str, Any]]:
    """Yield the chat messages that a message stands for: results of tools are messages of their own."""
    calls = []
    for block in message.content:
        if block.type == "tool_result":
            yield {"role": "tool", "content": block.content, "tool_call_id": block.tool_use_id}
        elif block.type == "tool_use":
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            calls.append({"id": block.id, "type": "function", "function": function})
    texts = [block.text for block in message.content if block.type == "text"]
    if texts or message.role == "assistant":
        yield {"role": message.role, "content": "".join(texts), "tool_calls": calls or None}


class Messages:
    """A request of the Messages API, and its answer; see ``ChatCompletions``."""

    def __init__(self, body: Mapping[str, Any], tokenizer: TextTokenizer) -> None:
        self.request = MessagesRequest.of(body).chat()
        self._id, self._has_text = f"msg_{uuid.uuid4().hex}", False

    def answer(self, turns: Sequence[Turn]) -> dict[str, Any]:
        """Return the body of the answer."""
        (turn,) = turns
        text = turn.message["content"]
        blocks = [{"type": "text", "text": text}] if text else []
        return self._message(turn, [*blocks, *({**_tool_use(call), "input": _input(call)} for call in turn.calls)])

    def begin(self, turns: Sequence[Turn]) -> str:
        """Return the first event of a stream."""
        return _named("message_start", message=self._message(turns[0], []))

    def add_text(self, turn: Turn, text: str) -> str:
        """Return the events of a part of the text."""
        start = "" if self._has_text else _named("content_block_start", index=0, content_block=_TEXT)
        self._has_text = True
        return start + _named("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def end(self, turns: Sequence[Turn]) -> str:
        """Return the events of tool calls and of the end."""
        (turn,) = turns
        events = [_named("content_block_stop", index=0)] if self._has_text else []
        for index, call in enumerate(turn.calls, int(self._has_text)):
            delta = {"type": "input_json_delta", "partial_json": json.dumps(_input(call))}
            events += [
                _named("content_block_start", index=index, content_block=_tool_use(call)),
                _named("content_block_delta", index=index, delta=delta),
                _named("content_block_stop", index=index),
            ]
        whole = self._message(turn, [])
        ended = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        return "".join([*events, _named("message_delta", delta=ended, usage=whole["usage"]), _named("message_stop")])

    def error(self, body: Mapping[str, Any]) -> str:
        """Return the event for an error in the middle of a stream."""
        return _named("error", **body)

    def _message(self, turn: Turn, content: list[dict[str, Any]]) -> dict[str, Any]:
        reason = "stop_sequence" if turn.reason == "stop" and turn.stopped_at is not None else REASONS.get(turn.reason)
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.request.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": turn.stopped_at if reason == "stop_sequence" else None,
            "usage": {"input_tokens": turn.prompt_tokens, "output_tokens": len(turn.tokens)},
        }


def _named(kind: str, **fields: Any) -> str:
    return event({"type": kind, **fields}, kind)


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}


def _input(call: Mapping[str, Any]) -> Any:
    return json.loads(call["function"]["arguments"])
