"""The Responses API of OpenAI, ``POST /v1/responses``: text and function calls, and no state between requests."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from trainer.data.tokenizers import TextTokenizer
from trainer.rollout.server.chat_api import event
from trainer.rollout.server.chat_requests import ApiRequest, ChatRequest, Fields, Function, Limit, Stops, Text
from trainer.rollout.server.sessions import Turn


class _Item(Fields):
    ignored = ("id", "status", "phase", "namespace", "caller", "summary", "encrypted_content")
    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: str | None = None
    content: Text | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Text = ""


class _Tool(Function):
    ignored = ("defer_loading",)
    type: Literal["function"]


class ResponsesRequest(ApiRequest):
    """A request of the Responses API."""

    ignored = (
        "include",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    )
    neutral: ClassVar[Mapping[str, Any]] = {
        "background": False,
        "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "top_logprobs": 0,
        "truncation": "disabled",
    }
    input: Annotated[
        list[_Item],
        BeforeValidator(lambda given: [{"role": "user", "content": given}] if isinstance(given, str) else given),
    ]
    instructions: str | None = None
    max_output_tokens: Limit | None = None
    stop: Stops = Field(default=[])
    tools: list[_Tool] = Field(default=[])

    def chat(self) -> ChatRequest:
        """Return the request for chat completions that this one stands for."""
        same = self.model_dump(exclude_none=True, exclude={"input", "instructions", "max_output_tokens", "tools"})
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        for role, group in itertools.groupby(_chat_messages(self.input), lambda message: message["role"]):
            parts = [*group]
            messages += [_merged(parts)] if role == "assistant" else parts
        tools = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools]
        return ChatRequest.of({**same, "messages": messages, "tools": tools, "max_tokens": self.max_output_tokens})


def _chat_messages(items: Sequence[_Item]) -> Iterator[dict[str, Any]]:
    for item in items:
        if item.type == "message":
            yield {"role": item.role, "content": item.content}
        elif item.type == "function_call":
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            yield {"role": "assistant", "tool_calls": [call]}
        elif item.type == "function_call_output":
            yield {"role": "tool", "content": item.output, "tool_call_id": item.call_id}


def _merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the message of the assistant that has the text and the calls of these."""
    texts = [part["content"] for part in parts if part.get("content") is not None]
    calls = [call for part in parts for call in part.get("tool_calls", ())]
    return {"role": "assistant", "content": "".join(texts) if texts else None, "tool_calls": calls or None}


class Responses:
    """A request of the Responses API, and its answer; see ``ChatCompletions``."""

    def __init__(self, body: Mapping[str, Any], tokenizer: TextTokenizer) -> None:
        self.request = ResponsesRequest.of(body).chat()
        self._repeated = {
            name: body.get(name) for name in ("instructions", "max_output_tokens", "temperature", "top_p")
        }
        self._repeated["tools"] = body.get("tools") or []
        self._number, self._created = uuid.uuid4().hex, int(time.time())
        self._text, self._numbers = "", itertools.count()
        self._place = {"item_id": f"msg_{self._number}", "output_index": 0, "content_index": 0}

    def answer(self, turns: Sequence[Turn]) -> dict[str, Any]:
        """Return the body of the answer."""
        (turn,) = turns
        text = turn.message["content"]
        return self._response(turn, [*([self._message(text)] if text else []), *self._calls(turn)])

    def begin(self, turns: Sequence[Turn]) -> str:
        """Return the first events of a stream."""
        response = self._response(turns[0], [])
        return "".join(self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress"))

    def add_text(self, turn: Turn, text: str) -> str:
        """Return the events of a part of the text."""
        events = []
        if not self._text:
            item = {**self._message(""), "status": "in_progress", "content": []}
            events.append(self._event("response.output_item.added", output_index=0, item=item))
            events.append(self._event("response.content_part.added", **self._place, part=_part("")))
        self._text += text
        return "".join([*events, self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])])

    def end(self, turns: Sequence[Turn]) -> str:
        """Return the events of tool calls and of the end."""
        (turn,), text = turns, self._text
        items, events = [self._message(text)] if text else [], []
        if text:
            events.append(self._event("response.output_text.done", **self._place, text=text, logprobs=[]))
            events.append(self._event("response.content_part.done", **self._place, part=_part(text)))
            events.append(self._event("response.output_item.done", output_index=0, item=items[0]))
        for index, call in enumerate(self._calls(turn), len(items)):
            item = {**call, "arguments": "", "status": "in_progress"}
            place = {"item_id": call["id"], "output_index": index}
            done = {"name": call["name"], "arguments": call["arguments"]}
            events.append(self._event("response.output_item.added", output_index=index, item=item))
            events.append(self._event("response.function_call_arguments.delta", **place, delta=call["arguments"]))
            events.append(self._event("response.function_call_arguments.done", **place, **done))
            events.append(self._event("response.output_item.done", output_index=index, item=call))
            items.append(call)
        kind = "response.incomplete" if turn.reason == "length" else "response.completed"
        return "".join([*events, self._event(kind, response=self._response(turn, items))])

    def error(self, body: Mapping[str, Any]) -> str:
        """Return the event for an error in the middle of a stream."""
        fields = {name: body["error"][name] for name in ("message", "code", "param")}
        return event({"type": "error", **fields}, "error")

    def _event(self, kind: str, **fields: Any) -> str:
        return event({"type": kind, "sequence_number": next(self._numbers), **fields}, kind)

    def _message(self, text: str) -> dict[str, Any]:
        whole = {"type": "message", "id": f"msg_{self._number}", "status": "completed", "role": "assistant"}
        return {**whole, "content": [_part(text)]}

    def _calls(self, turn: Turn) -> list[dict[str, Any]]:
        made = []
        for index, call in enumerate(turn.calls):
            names = {"id": f"fc_{self._number}_{index}", "call_id": call["id"], **call["function"]}
            made.append({"type": "function_call", "status": "completed", **names})
        return made

    def _response(self, turn: Turn, output: list[dict[str, Any]]) -> dict[str, Any]:
        is_cut = turn.reason == "length"
        used = {"input_tokens": turn.prompt_tokens, "output_tokens": len(turn.tokens)}
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        return {
            **self._repeated,
            "id": f"resp_{self._number}",
            "object": "response",
            "created_at": self._created,
            "status": "incomplete" if is_cut else "completed" if turn.reason else "in_progress",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "metadata": {},
            "model": self.request.model,
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "usage": {**used, **details, "total_tokens": sum(used.values())} if turn.reason else None,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
