"""The Responses API of OpenAI: text and function calls, and no state of the server's between requests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.rollout.server.api import ChatCompletions
from trainer.rollout.server.chat_requests import check_fields, reject, shown, typed
from trainer.rollout.server.sessions import Turn

SAME = ("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "stream")
"""Fields that chat completions have under the same name."""
IGNORED = (
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
FIXED: Mapping[str, Any] = {
    "background": False,
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "top_logprobs": 0,
    "truncation": "disabled",
}
"""Fields of which only the value is supported that leaving them out means."""
USED = ("input", "instructions", "max_output_tokens", "tools", *SAME)


class Responses(ChatCompletions):
    """A request of the Responses API, and its answer: ``POST /v1/responses``."""

    prefix = "resp"

    def translated(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the request for chat completions that a body stands for."""
        given = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
        check_fields(given, "the request", (*USED, *FIXED))
        for name, value in FIXED.items():
            if name in given and given[name] != value:
                reject(f"{name}={shown(given[name])} is not supported; leave it out", param=name)
        self._body, self._number = given, 0
        messages = [*_messages(given.get("input"))]
        if "instructions" in given:
            messages.insert(0, {"role": "system", "content": given["instructions"]})
        chat = {name: given[name] for name in SAME if name in given}
        if "max_output_tokens" in given:
            chat["max_tokens"] = given["max_output_tokens"]
        return {**chat, "messages": messages, "tools": [*_tools(given.get("tools", []))]}

    def answer(self, turns: Sequence[Turn]) -> dict[str, Any]:
        """Return the body of the answer."""
        (turn,) = turns
        return self._response(turn, self._output(turn))

    def start(self, turns: Sequence[Turn]) -> Iterator[str]:
        """Return the first events of a stream."""
        self._ids = {"message": self.new_id("msg")}
        self._text = ""
        for kind in ("response.created", "response.in_progress"):
            yield self._named(kind, response=self._response(turns[0], []))

    def delta(self, turn: Turn, text: str) -> Iterator[str]:
        """Return the events for a text that has arrived."""
        if not self._text:
            item = {**self._message(""), "status": "in_progress", "content": []}
            yield self._named("response.output_item.added", output_index=0, item=item)
            yield self._named("response.content_part.added", **self._place(), part=_part(""))
        self._text += text
        yield self._named("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    def turn_end(self, turn: Turn) -> Iterator[str]:
        """Return the events for the tool calls and the end of a turn."""
        if self._text:
            yield self._named("response.output_text.done", **self._place(), text=self._text, logprobs=[])
            yield self._named("response.content_part.done", **self._place(), part=_part(self._text))
            yield self._named("response.output_item.done", output_index=0, item=self._message(self._text))
        self._items = [self._message(self._text)] if self._text else []
        for call in map(self._call, turn.calls):
            place = {"output_index": len(self._items), "item_id": call["id"]}
            item = {**call, "arguments": "", "status": "in_progress"}
            yield self._named("response.output_item.added", output_index=place["output_index"], item=item)
            arguments = call["arguments"]
            yield self._named("response.function_call_arguments.delta", **place, delta=arguments)
            done = {"name": call["name"], "arguments": arguments}
            yield self._named("response.function_call_arguments.done", **place, **done)
            yield self._named("response.output_item.done", output_index=place["output_index"], item=call)
            self._items.append(call)

    def end(self, turns: Sequence[Turn]) -> Iterator[str]:
        """Return the last events of a stream."""
        (turn,) = turns
        kind = "response.incomplete" if turn.reason == "length" else "response.completed"
        yield self._named(kind, response=self._response(turn, self._items))

    def error(self, body: Mapping[str, Any]) -> str:
        """Return the event for an error in the middle of a stream."""
        return self._named("error", **{name: body["error"][name] for name in ("message", "code", "param")})

    def _named(self, kind: str, **fields: Any) -> str:
        self._number += 1
        event = {"type": kind, "sequence_number": self._number - 1, **fields}
        return f"event: {kind}\ndata: {json.dumps(event)}\n\n"

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._ids["message"], "output_index": 0, "content_index": 0}

    def _output(self, turn: Turn) -> list[dict[str, Any]]:
        self._ids = {"message": self.new_id("msg")}
        text = turn.message["content"]
        return [*([self._message(text)] if text else []), *map(self._call, turn.calls)]

    def _message(self, text: str) -> dict[str, Any]:
        whole = {"type": "message", "id": self._ids["message"], "status": "completed", "role": "assistant"}
        return {**whole, "content": [_part(text)]}

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        item_id = self._ids.setdefault(call["id"], self.new_id("fc"))
        whole = {"type": "function_call", "id": item_id, "call_id": call["id"], "status": "completed"}
        return {**whole, **call["function"]}

    def _response(self, turn: Turn, output: list[dict[str, Any]]) -> dict[str, Any]:
        status = "in_progress" if not turn.reason else "incomplete" if turn.reason == "length" else "completed"
        used = {"input_tokens": turn.prompt_tokens, "output_tokens": len(turn.tokens)}
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": self._body.get("instructions"),
            "max_output_tokens": self._body.get("max_output_tokens"),
            "metadata": {},
            "model": self.request.model,
            "output": output,
            "parallel_tool_calls": True,
            "temperature": self._body.get("temperature"),
            "tool_choice": "auto",
            "tools": self._body.get("tools", []),
            "top_p": self._body.get("top_p"),
            "usage": {**used, **details, "total_tokens": sum(used.values())} if turn.reason else None,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _messages(items: Any) -> Iterator[dict[str, Any]]:
    """Return the chat messages of an input; text and calls of a turn of the assistant are one message."""
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    last: dict[str, Any] | None = None
    for index, item in enumerate(typed(items, "input", list)):
        where = f"input[{index}]"
        kind = typed(item, where, dict).get("type", "message")
        if kind == "reasoning":
            continue
        if kind == "function_call_output":
            message: dict[str, Any] = {"role": "tool", "content": _text(item.get("output"), f"{where}.output")}
            message["tool_call_id"] = item.get("call_id")
        elif kind == "function_call":
            function = {name: item.get(name) for name in ("name", "arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        elif kind == "message":
            message = {"role": item.get("role"), "content": _text(item.get("content"), f"{where}.content")}
        else:
            reject(f"{where}.type is {shown(kind)}, which is not supported", param=f"{where}.type")
        if last is None or message["role"] != "assistant" or last["role"] != "assistant":
            if last is not None:
                yield last
            last = message
        else:
            texts = [text for text in (last["content"], message["content"]) if text is not None]
            calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
            last = {"role": "assistant", "content": "".join(texts) if texts else None, "tool_calls": calls}
    if last is not None:
        yield last


def _text(content: Any, where: str) -> str:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else typed(content, where, list)
    texts = []
    for index, part in enumerate(parts):
        if typed(part, f"{where}[{index}]", dict).get("type") not in ("text", "input_text", "output_text"):
            reject(f"{where}[{index}].type is {shown(part.get('type'))}; expected a text", param=where)
        texts.append(typed(part.get("text"), f"{where}[{index}].text", str))
    return "".join(texts)


def _tools(tools: Any) -> Iterator[dict[str, Any]]:
    for index, tool in enumerate(typed(tools, "tools", list)):
        where = f"tools[{index}]"
        check_fields(tool, where, ("type", "name", "description", "parameters", "strict", "defer_loading"))
        function = {name: tool.get(name) for name in ("name", "description", "parameters", "strict") if name in tool}
        yield {"type": tool.get("type"), "function": function}
