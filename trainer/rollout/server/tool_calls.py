"""Tool calls in what a policy writes, by the format of its family of models."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mcontroller.config.registry import Registry
from mcontroller.errors import ConfigError
from trainer.data.tokenizers import TextTokenizer
from workers.generate.vllm.engine_process import FIND_TOOL_CALLS, EngineError, EngineProcess

_START_S, _ANSWER_S = 300.0, 60.0

Calls = tuple[str, list[tuple[str, str]]]
"""The text around the calls, and names and JSON arguments of the calls."""


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls.

    Attributes:
        parse: returns the calls of a text, for the tools of the request. What is no call stays in the text. The third
            argument is the token ids of the turn; none if a stop text has cut it.
        starts: texts with which a call can begin: a stream waits there for the end of the turn.
    """

    parse: Callable[[str, Sequence[Any], Sequence[int]], Calls]
    starts: tuple[str, ...]


TOOL_FORMATS: Registry[ToolFormat] = Registry(
    "format of tool calls without rollout.engine=vllm", key="multi_turn.options.tool_calls"
)
"""Formats by name, beside those of vLLM; ``TOOL_FORMATS.add`` adds one."""


def hermes(text: str, tools: Sequence[Any] = (), tokens: Sequence[int] = ()) -> Calls:
    """Return the calls that are ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""
    calls: list[tuple[str, str]] = []

    def rest(match: re.Match[str]) -> str:
        call = _call(match[1])
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    return re.sub(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", rest, text, flags=re.DOTALL), calls


TOOL_FORMATS.add("hermes", ToolFormat(hermes, ("<tool_call>",)))


def tool_format(name: str, tokenizer: TextTokenizer, vllm_python: str | None) -> ToolFormat:
    """Return the format of a name of ``TOOL_FORMATS``, or that of a parser of vLLM, such as ``deepseek_v31``.

    Args:
        name: of the format.
        tokenizer: of the policy. A parser of vLLM takes its files.
        vllm_python: the interpreter that has vLLM, in which a parser starts in about 10 s; None: there is no vLLM.

    Raises:
        ConfigError: there is none of this name, no vLLM, or the parser does not take the tokenizer.
    """
    if vllm_python is None or name in TOOL_FORMATS:
        return TOOL_FORMATS.get_or_raise(name)
    key = TOOL_FORMATS.key
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        arguments = {"name": name, "folder": f"{folder}/tokenizer"}
        limits = {"start_timeout_s": _START_S, "silence_timeout_s": _ANSWER_S}
        try:
            parser = EngineProcess(arguments, {}, **limits, python=vllm_python, program=FIND_TOOL_CALLS)
        except EngineError as error:
            text = f"{key} is {name!r}, and vLLM's parser does not start: {error}"
            raise ConfigError(text, key=key, value=name) from error

    def parse(text: str, tools: Sequence[Any], tokens: Sequence[int]) -> Calls:
        found: Calls | None = parser.call("find", text=text, tools=[*tools], tokens=[*tokens])
        if found is None or any(not isinstance(_json(arguments), dict) for _, arguments in found[1]):
            return text, []
        return found

    return ToolFormat(parse, ("",))  # any text may be part of a call


def _call(text: str) -> tuple[str, str] | None:
    """Return name and arguments of an object of JSON; None if it is no call, whose arguments are an object too.

    Arguments that are JSON in a text are returned as they are.
    """
    call = _json(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return (call["name"], text) if isinstance(_json(text), dict) else None


def _json(text: str) -> Any:
    """Return what a text in JSON stands for; None if it is no JSON, or has values that no text can be made of."""
    try:
        value = json.loads(text, parse_constant=_reject_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
