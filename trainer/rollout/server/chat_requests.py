"""Requests for chat completions: the fields that a client may send, checked before anything uses them.

What a client sends is used as it is named, or rejected with the field and the status that OpenAI's API answers with.
Requests of the other APIs are translated into these.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

from mcontroller.config.checks import close_names
from mcontroller.errors import DataError

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
"""Fields that change how a turn is sampled; the rollout checks their values."""
USED = (
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "model",
    "n",
    "stop",
    "stream",
    "stream_options",
    "tools",
    *SAMPLING,
)
IGNORED = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
"""Fields that change nothing of a response."""
FIXED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "frequency_penalty": (0, 0.0),
    "function_call": (),
    "functions": (),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "presence_penalty": (0, 0.0),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields of OpenAI's API that are not supported, and the values that are the same as leaving them out, beside null."""

ROLES: Mapping[str, tuple[str, ...]] = {
    "system": ("role", "content", "name"),
    "developer": ("role", "content", "name"),
    "user": ("role", "content", "name"),
    "assistant": (
        "role",
        "content",
        "name",
        "tool_calls",
        "reasoning_content",
        "annotations",
        "audio",
        "function_call",
        "refusal",
    ),
    "tool": ("role", "content", "name", "tool_call_id"),
}
"""Roles of messages, and their fields."""

MAX_DEPTH = 64
"""Most levels of nested lists and objects of a request."""
MAX_NAME = 256
"""[characters] Longest name or id in a request."""
MAX_CHOICES = 128
"""Most choices, ``n``, of a request."""
MAX_STOPS = 16
"""Most stop texts of a request."""


class RequestError(DataError):
    """A request that is answered with an error of OpenAI's API.

    Attributes:
        status: of HTTP.
        code: the error for programs, such as ``invalid_api_key``; None: there is no name for it.
        param: the field of the request; None: the request as a whole.
    """

    status: int
    code: str | None
    param: str | None

    def body(self) -> dict[str, Any]:
        """Return the body of the answer, which clients of Anthropic's API can read as well."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def reject(message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> NoReturn:
    """Raise a ``RequestError``."""
    raise RequestError(message, status=status, code=code, param=param)


@dataclass(frozen=True)
class ChatRequest:
    """A request whose fields have the types that they should have.

    Attributes:
        model: the name that the answer repeats: there is one policy.
        messages: with contents that are texts, and the role ``system`` for ``developer``, which models do not know.
        tools: as received.
        sampling: the fields of ``SAMPLING`` that are set; their values are not checked.
        max_tokens: [tokens] the most of this turn; None: as many as there is room for.
        n: the number of choices.
        stop: texts that end a turn, and are left out of its text.
        logprobs: whether the answer has the log-probability of every token.
        stream: whether the answer is a stream of events.
        include_usage: whether the stream ends with the number of tokens.
    """

    model: str
    messages: list[dict[str, Any]]
    tools: list[Any]
    sampling: Mapping[str, Any]
    max_tokens: int | None
    n: int
    stop: list[str]
    logprobs: bool
    stream: bool
    include_usage: bool

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> ChatRequest:
        """Return the request of an object of JSON.

        Raises:
            RequestError: a field is unknown or not supported, or a value has another type.
        """
        for name in request:
            if name not in (*USED, *IGNORED, *FIXED):
                reject(f"{name[:60]!r} is unknown{close_names(name, (*USED, *IGNORED, *FIXED))}", param=name[:60])
        given = {name: value for name, value in request.items() if value is not None and name not in IGNORED}
        for name, values in FIXED.items():
            if name in given and not any(_same(given[name], value) for value in values):
                reject(f"{name}={shown(given[name])} is not supported; leave it out", param=name)
        stream = typed(given.get("stream", False), "stream", bool)
        options = typed(given.get("stream_options", {}), "stream_options", dict)
        check_fields(options, "stream_options", ("include_usage", "include_obfuscation"))
        if options and not stream:
            reject("stream_options is for stream=true; leave it out", param="stream_options")
        return cls(
            model=short_text(given.get("model", "policy"), "model"),
            messages=_messages(given.get("messages")),
            tools=_tools(given.get("tools", [])),
            sampling={name: given[name] for name in SAMPLING if name in given},
            max_tokens=_max_tokens(given),
            n=_choices(given.get("n", 1)),
            stop=_stop(given.get("stop", [])),
            logprobs=typed(given.get("logprobs", False), "logprobs", bool),
            stream=stream,
            include_usage=typed(options.get("include_usage", False), "stream_options.include_usage", bool),
        )


def same_conversation(before: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the messages begin with those before, and go on."""
    return len(messages) > len(before) > 0 and [*map(_said, before)] == [*map(_said, messages[: len(before)])]


def is_text(text: str) -> bool:
    """Return whether a text can be encoded: JSON can write half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _said(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a message says.

    Clients add a name to the policy's messages, write no content in several ways, drop the space around it, and write
    the JSON of arguments again.
    """
    content = message.get("content") or ""
    if message["role"] == "assistant":
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = [(function["name"], _value(function["arguments"])) for function in functions]
        return "assistant", content.strip(), calls
    return message["role"], message.get("name"), content, message.get("tool_call_id")


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def parsed(body: bytes) -> dict[str, Any]:
    """Return the object of a body.

    Raises:
        RequestError: it is not JSON in UTF-8, or no object; it has too many levels, or something that is no text.
    """

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        request = json.loads(body.decode(), parse_constant=constant)
    except (ValueError, RecursionError) as error:
        reject(f"the body is not JSON in UTF-8: {str(error)[:200]}", code="invalid_json")
    if not isinstance(request, dict):
        reject(f"the body is of type {type(request).__name__}; expected a JSON object", code="invalid_json")
    levels: list[Iterator[Any]] = [iter((request,))]
    while levels:
        value = next(levels[-1], levels)
        if value is levels:
            levels.pop()
        elif isinstance(value, str) and not is_text(value):
            reject(f"{value[:60]!a} has half of a surrogate pair, which is no text")
        elif isinstance(value, float) and not math.isfinite(value):
            reject("a number is too large for a float")
        elif isinstance(value, dict | list):
            levels.append(chain(value, value.values()) if isinstance(value, dict) else iter(value))
            if len(levels) > MAX_DEPTH:
                reject(f"the body has more than {MAX_DEPTH} levels of lists and objects")
    return request


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        reject(f"messages is {shown(messages)}; expected a list of chat messages", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    role = typed(message, where, dict).get("role")
    if not isinstance(role, str) or role not in ROLES:
        reject(f"{where}.role is {shown(role)}; expected one of {', '.join(ROLES)}", param=f"{where}.role")
    check_fields(message, where, ROLES[role])
    made: dict[str, Any] = {"role": "system" if role == "developer" else role}
    content = message.get("content")
    made["content"] = None if content is None and role == "assistant" else _text(content, f"{where}.content")
    for name in ("refusal", "audio", "function_call"):
        if message.get(name) is not None:
            reject(f"{where}.{name} is not supported; leave it out", param=f"{where}.{name}")
    if message.get("name") is not None:
        made["name"] = short_text(message["name"], f"{where}.name")
    if message.get("reasoning_content") is not None:
        made["reasoning_content"] = typed(message["reasoning_content"], f"{where}.reasoning_content", str)
    if role == "tool":
        made["tool_call_id"] = short_text(message.get("tool_call_id"), f"{where}.tool_call_id")
    calls = typed(message.get("tool_calls") or [], f"{where}.tool_calls", list)
    if calls:
        made["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return made


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        reject(f"{where} is {shown(content)}; expected a text, or parts of type text", param=where)
    for index, part in enumerate(parts):
        check_fields(part, f"{where}[{index}]", ("type", "text"))
    return "".join(typed(part.get("text"), f"{where}[{index}].text", str) for index, part in enumerate(parts))


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    check_fields(call, where, ("id", "type", "function", "index"))
    if call.get("type", "function") != "function":
        reject(f"{where}.type is {shown(call['type'])}; expected function", param=f"{where}.type")
    check_fields(call.get("function"), f"{where}.function", ("name", "arguments"))
    name = typed(call["function"].get("name"), f"{where}.function.name", str)
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        param = f"{where}.function.arguments"
        reject(f'{param} is {shown(arguments)}; expected JSON as a text, such as "{{}}"', param=param)
    function = {"name": name, "arguments": arguments}
    return {"id": short_text(call.get("id"), f"{where}.id"), "type": "function", "function": function}


def _tools(tools: Any) -> list[Any]:
    for index, tool in enumerate(typed(tools, "tools", list)):
        where = f"tools[{index}]"
        check_fields(tool, where, ("type", "function"))
        if tool.get("type") != "function":
            reject(f"{where}.type is {shown(tool.get('type'))}; expected function", param=f"{where}.type")
        function = tool.get("function")
        check_fields(function, f"{where}.function", ("name", "description", "parameters", "strict"))
        short_text(function.get("name"), f"{where}.function.name")
        for name, kind in (("description", str), ("parameters", dict), ("strict", bool)):
            if function.get(name) is not None:
                typed(function[name], f"{where}.function.{name}", kind)
    return list(tools)


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    limits = {name: given[name] for name in ("max_tokens", "max_completion_tokens") if name in given}
    if len(limits) > 1:
        reject("max_tokens and max_completion_tokens are the same limit; leave out max_tokens", param="max_tokens")
    for name, limit in limits.items():
        if typed(limit, name, int) < 1:
            reject(f"{name} is {shown(limit)}; it must be at least 1", param=name)
        return int(limit)
    return None


def _choices(n: Any) -> int:
    if not 1 <= typed(n, "n", int) <= MAX_CHOICES:
        reject(f"n is {shown(n)}; expected 1 to {MAX_CHOICES}", param="n")
    return int(n)


def _stop(stop: Any) -> list[str]:
    stops = [stop] if isinstance(stop, str) else typed(stop, "stop", list)
    if len(stops) > MAX_STOPS:
        reject(f"stop has {len(stops)} texts; expected at most {MAX_STOPS}", param="stop")
    return [short_text(text, "stop" if stops is not stop else f"stop[{at}]") for at, text in enumerate(stops)]


def check_fields(value: Any, where: str, known: Collection[str]) -> None:
    """Reject what is no object, and an object with a field of another name."""
    for name in typed(value, where, dict):
        if name not in known:
            reject(f"{where}.{name[:60]} is unknown{close_names(name, known)}", param=where)


def typed(value: Any, where: str, kind: type) -> Any:
    """Return a value of this type, which is not a subclass: True is no int."""
    if type(value) is not kind:
        names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "an integer"}
        reject(f"{where} is {shown(value)}; expected {names[kind]}", param=where)
    return value


def short_text(value: Any, where: str) -> str:
    """Return a text of 1 to ``MAX_NAME`` characters."""
    if not 1 <= len(typed(value, where, str)) <= MAX_NAME:
        reject(f"{where} has {len(value)} characters; expected 1 to {MAX_NAME}", param=where)
    return str(value)


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def shown(value: Any) -> str:
    """Return how a message shows a value."""
    return "missing" if value is None else repr(value)[:60]
