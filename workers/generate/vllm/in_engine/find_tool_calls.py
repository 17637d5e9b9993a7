"""Find tool calls with a parser of vLLM: ``python find_tool_calls.py DESCRIPTOR``, for an ``EngineProcess``."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any


class Parser:
    """A parser of vLLM.

    Args:
        name: of vLLM's, such as ``llama3_json``.
        folder: of the tokenizer's files.

    Raises:
        ValueError: vLLM has no parser of this name.
    """

    def __init__(self, name: str, folder: str) -> None:
        from transformers import AutoTokenizer
        from vllm.tool_parsers import ToolParserManager

        known = ToolParserManager.list_registered()
        if name not in known:
            raise ValueError(f"vLLM has no parser {name!r}; it has {', '.join(known)}")
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        self._parser = ToolParserManager.get_tool_parser(name)
        self._parser(self._tokenizer)  # which raises an error if the tokenizer lacks a token of the format

    def find(self, text: str, tools: Sequence[Any], tokens: Sequence[int]) -> tuple[str, list[tuple[str, str]]] | None:
        """Return the text around the calls, and names and arguments of these; None if the parser finds none.

        Args:
            text: without special tokens.
            tools: of the request.
            tokens: token ids of the text, for parsers that read special tokens; none if they are not known.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest(messages=[{"role": "user", "content": ""}], tools=tools)
        parser = self._parser(self._tokenizer, request.tools)
        request = parser.adjust_request(request)
        if tokens and not request.skip_special_tokens:
            text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        try:
            found = parser.extract_tool_calls(text, request)
        except Exception:  # a policy writes anything
            traceback.print_exc()
            return None
        calls = [(call.function.name, call.function.arguments) for call in found.tool_calls]
        return (found.content or "", calls) if calls else None


def serve() -> None:
    """Answer calls until the other side closes the connection."""
    connection, parser = Connection(int(sys.argv[1])), None
    while True:
        try:
            method, arguments = connection.recv()
        except (EOFError, ConnectionResetError):
            os._exit(0)  # what vLLM has imported takes seconds to end
        try:
            if parser is None:
                parser = Parser(**arguments)
                answer: tuple[Any, ...] = ("result", {})
            else:
                answer = ("result", getattr(parser, method)(**arguments))
        except Exception as error:
            answer = ("error", f"{type(error).__name__}: {error}", traceback.format_exc())
        connection.send(answer)


if __name__ == "__main__":
    serve()
