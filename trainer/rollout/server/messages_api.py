"""The Messages API of Anthropic: text and tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.rollout.server.api import ChatCompletions
from trainer.rollout.server.chat_requests import check_fields, reject, shown, typed
from trainer.rollout.server.sessions import Turn

SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
"""Fields that chat completions have under the same name."""
IGNORED = ("cache_control", "container", "context_management", "metadata", "service_tier")
USED = ("messages", "stop_sequences", "system", "thinking", "tool_choice", "tools", *SAME)
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Messages(ChatCompletions):
    """A request of the Messages API, and its answer: ``POST /v1/messages``."""

    prefix = "msg"

    def translated(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the request for chat completions that a body stands for."""
        given = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
        check_fields(given, "the request", USED)
        for name, kinds in (("tool_choice", ("auto",)), ("thinking", ("disabled",))):
            if name in given and typed(given[name], name, dict).get("type") not in kinds:
                reject(f"{name}={shown(given[name])} is not supported; leave it out", param=name)
        if "max_tokens" not in given:
            reject("max_tokens is missing; expected an integer", param="max_tokens")
        messages = [{"role": "system", "content": _text(given["system"], "system")}] if "system" in given else []
        for index, message in enumerate(typed(given.get("messages"), "messages", list)):
            messages += _messages(message, f"messages[{index}]")
        chat = {name: given[name] for name in SAME if name in given}
        listed = typed(given.get("tools", []), "tools", list)
        tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(listed)]
        return {**chat, "messages": messages, "tools": tools, "stop": given.get("stop_sequences", [])}

    def answer(self, turns: Sequence[Turn]) -> dict[str, Any]:
        """Return the body of the answer."""
        (turn,) = turns
        text = turn.message["content"]
        blocks = [{"type": "text", "text": text}] if text else []
        return self._message(turn, [*blocks, *({**_tool_use(call), "input": _input(call)} for call in turn.calls)])

    def start(self, turns: Sequence[Turn]) -> Iterator[str]:
        """Return the first events of a stream."""
        self._is_open, self._blocks = False, 0
        yield _event("message_start", message=self._message(turns[0], []))

    def delta(self, turn: Turn, text: str) -> Iterator[str]:
        """Return the events for a text that has arrived."""
        if not self._is_open:
            self._is_open = True
            yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def turn_end(self, turn: Turn) -> Iterator[str]:
        """Return the events for the tool calls and the end of a turn."""
        if self._is_open:
            yield _event("content_block_stop", index=0)
        for index, call in enumerate(turn.calls, int(self._is_open)):
            yield _event("content_block_start", index=index, content_block=_tool_use(call))
            delta = {"type": "input_json_delta", "partial_json": json.dumps(_input(call))}
            yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)

    def end(self, turns: Sequence[Turn]) -> Iterator[str]:
        """Return the last events of a stream."""
        whole = self._message(turns[0], [])
        delta = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=delta, usage=whole["usage"])
        yield _event("message_stop")

    def error(self, body: Mapping[str, Any]) -> str:
        """Return the event for an error in the middle of a stream."""
        return _event("error", **body)

    def _message(self, turn: Turn, content: list[dict[str, Any]]) -> dict[str, Any]:
        reason = "stop_sequence" if turn.reason == "stop" and turn.stopped_at is not None else REASONS.get(turn.reason)
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.request.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": turn.stopped_at if reason == "stop_sequence" else None,
            "usage": {"input_tokens": turn.prompt_tokens, "output_tokens": len(turn.tokens)},
        }


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}


def _input(call: Mapping[str, Any]) -> Any:
    return json.loads(call["function"]["arguments"])


def _messages(message: Any, where: str) -> Iterator[dict[str, Any]]:
    """Return the chat messages that a message stands for: results of tools are messages of their own."""
    check_fields(message, where, ("role", "content"))
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        reject(f"{where}.role is {shown(role)}; expected user or assistant", param=f"{where}.role")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts, calls = [], []
    for index, block in enumerate(typed(blocks, f"{where}.content", list)):
        place = f"{where}.content[{index}]"
        kind = typed(block, place, dict).get("type")
        if kind == "text":
            texts.append(typed(block.get("text"), f"{place}.text", str))
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"))}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            result = _text(block.get("content") or "", f"{place}.content")
            yield {"role": "tool", "content": result, "tool_call_id": block.get("tool_use_id")}
        elif kind not in ("thinking", "redacted_thinking"):
            reject(f"{place}.type is {shown(kind)}, which is not supported", param=f"{place}.type")
    if role == "assistant":
        yield {"role": role, "content": "".join(texts), **({"tool_calls": calls} if calls else {})}
    elif texts:
        yield {"role": role, "content": "".join(texts)}


def _text(content: Any, where: str) -> str:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else typed(content, where, list)
    for index, block in enumerate(blocks):
        if typed(block, f"{where}[{index}]", dict).get("type") != "text":
            reject(f"{where}[{index}].type is {shown(block.get('type'))}; expected text", param=where)
    return "".join(typed(block.get("text"), f"{where}.text", str) for block in blocks)


def _tool(tool: Any, where: str) -> dict[str, Any]:
    check_fields(tool, where, ("type", "name", "description", "input_schema", "cache_control", "strict"))
    if tool.get("type", "custom") != "custom":
        reject(f"{where}.type is {shown(tool['type'])}; expected custom", param=f"{where}.type")
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    function = {name: tool[given] for given, name in names.items() if tool.get(given) is not None}
    return {"type": "function", "function": function}
