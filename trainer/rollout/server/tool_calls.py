"""Tool calls in what a policy writes, by the format of its family of models."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from mcontroller.config.registry import Registry

Calls = tuple[str, list[tuple[str, str]]]
"""The text around the calls, and names and JSON arguments of the calls."""


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls.

    Attributes:
        parse: returns the calls of a text, for the tools of the request. What is no call stays in the text.
        starts: texts with which a call can begin: a stream waits there for the end of the turn.
    """

    parse: Callable[[str, Sequence[Any]], Calls]
    starts: tuple[str, ...]


TOOL_FORMATS: Registry[ToolFormat] = Registry("format of tool calls", key="multi_turn.options.tool_calls")
"""Formats by name; ``TOOL_FORMATS.add`` adds one."""


def hermes(text: str, tools: Sequence[Any] = ()) -> Calls:
    """Return the calls that are ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""
    return _replaced(re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL), text, lambda it: _call(it[1]))


def qwen3_coder(text: str, tools: Sequence[Any] = ()) -> Calls:
    """Return the calls that are ``<function=NAME><parameter=KEY>VALUE</parameter>...</function>`` in ``<tool_call>``.

    A value is JSON, unless it is none or the tool declares a string.
    """
    declared = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}

    def call(match: re.Match[str]) -> tuple[str, str] | None:
        properties = declared.get(match[1], {}).get("properties")
        arguments = {}
        for key, value in re.findall(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", match[2], re.DOTALL):
            schema = properties.get(key) if isinstance(properties, Mapping) else None
            is_string = isinstance(schema, Mapping) and schema.get("type") == "string"
            arguments[key] = value if is_string else _json(value, default=value)
        return match[1], json.dumps(arguments)

    pattern = r"<tool_call>\s*<function=([^>\s]+)>(.*?)</function>\s*</tool_call>"
    return _replaced(re.compile(pattern, re.DOTALL), text, call)


def llama3_json(text: str, tools: Sequence[Any] = ()) -> Calls:
    """Return the call of a text that is ``{"name": ..., "parameters": {...}}``, or several with ``;`` between."""
    return _whole(text, text.strip().removeprefix("<|python_tag|>"), separator=";")


def mistral(text: str, tools: Sequence[Any] = ()) -> Calls:
    """Return the calls of a text that ends with ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``.

    A tokenizer that leaves out special tokens leaves out the marker.
    """
    before, _, listed = text.rpartition("[TOOL_CALLS]")
    values = _json(listed.strip())
    calls = [_call(json.dumps(value)) for value in values] if isinstance(values, list) else []
    valid = [call for call in calls if call is not None]
    return (before, valid) if valid and len(valid) == len(calls) else (text, [])


def pythonic(text: str, tools: Sequence[Any] = ()) -> Calls:
    """Return the calls of a text that is ``[name(key=value), ...]``, whose values are literals of Python."""
    try:
        body = ast.parse(text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>"), mode="eval").body
        listed = body.elts if isinstance(body, ast.List) else []
        calls = []
        for item in listed:
            if not isinstance(item, ast.Call) or item.args or any(word.arg is None for word in item.keywords):
                return text, []
            arguments = {word.arg: ast.literal_eval(word.value) for word in item.keywords}
            calls.append((ast.unparse(item.func), json.dumps(arguments, allow_nan=False)))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text, []
    return ("", calls) if calls else (text, [])


TOOL_FORMATS.add("hermes", ToolFormat(hermes, ("<tool_call>",)))
TOOL_FORMATS.add("qwen3_coder", ToolFormat(qwen3_coder, ("<tool_call>",)))
TOOL_FORMATS.add("llama3_json", ToolFormat(llama3_json, ("{", "<|python_tag|>")))
TOOL_FORMATS.add("mistral", ToolFormat(mistral, ("[",)))
TOOL_FORMATS.add("pythonic", ToolFormat(pythonic, ("[", "<|python_start|>")))


def _replaced(pattern: re.Pattern[str], text: str, call: Callable[[re.Match[str]], tuple[str, str] | None]) -> Calls:
    """Return the text without the matches that are calls, and these."""
    calls: list[tuple[str, str]] = []

    def rest(match: re.Match[str]) -> str:
        made = call(match)
        if made is None:
            return match[0]
        calls.append(made)
        return ""

    return pattern.sub(rest, text), calls


def _whole(text: str, written: str, separator: str) -> Calls:
    """Return the calls of a text that has nothing else."""
    calls: list[tuple[str, str]] = []
    decoder = json.JSONDecoder()
    at = 0
    try:
        while at < len(written):
            _, end = decoder.raw_decode(written, at)
            call = _call(written[at:end])
            if call is None:
                return text, []
            calls.append(call)
            after = written[end:].lstrip()
            if after and not after.startswith(separator):
                return text, []
            at = len(written) - len(after.removeprefix(separator).lstrip())
    except (ValueError, RecursionError):
        return text, []
    return ("", calls) if calls else (text, [])


def _call(text: str) -> tuple[str, str] | None:
    """Return name and arguments of an object of JSON; None if it is no call.

    Arguments that are JSON in a text are returned as they are.
    """
    call = _json(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str) and isinstance(_json(arguments), dict):
        return call["name"], arguments
    return call["name"], json.dumps(arguments)


def _json(text: str, default: Any = None) -> Any:
    """Return what a text in JSON stands for, unless it is no JSON, or has values that no text can be made of."""
    try:
        value = json.loads(text, parse_constant=_reject_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return default
    return value


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
