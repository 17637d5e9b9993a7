"""Tool calls of a policy as vLLM's parsers find them, through the server of agents."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from mcontroller.errors import ConfigError
from tests.trainer.rollout.server.test_chat_templates import Scripted, tokenizer_of
from tests.vllm.policies import PYTHON
from trainer.config import MultiTurnConfig
from trainer.data.hf_tokenizer import HuggingFaceTokenizer
from trainer.rollout.server.chat_requests import ChatRequest
from trainer.rollout.server.sessions import ChatSession, Turn
from trainer.rollout.server.tool_calls import ToolFormat, tool_format
from trainer.run.parts import make_episodes

PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": PARAMETERS}}]
CODER = "So: <tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>"


def answer_of(tools: ToolFormat, tokenizer: HuggingFaceTokenizer, text: str, *, stream: bool) -> tuple[Turn, str]:
    """Return the turn of a policy that writes a text, and what a client streams."""
    rollout, sent = Scripted(tokenizer), ""
    rollout.text = text

    async def play() -> tuple[Turn, str]:
        nonlocal sent
        session = ChatSession(rollout, tokenizer, tools, "a", 1)
        request = {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS, "stream": stream}
        (turn,) = await session.submit(ChatRequest.of(request))
        async for each in session.generate([turn], asyncio.Lock(), timeout_s=30):
            sent += each.next_text()
        return turn, sent

    return asyncio.run(play())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "family", "answers"),
    [
        (
            "mistral",
            "mistral-nemo",
            [
                ('So: [TOOL_CALLS][{"name": "f", "arguments": {"n": 5}}]</s>', "So:", [("f", {"n": 5})]),
                ("[f(n=5)]</s>", "[f(n=5)]", []),
                ('[TOOL_CALLS][{"name": "f", "arguments"</s>', '[{"name": "f", "arguments"', []),
            ],
        ),
        (
            "qwen3_coder",
            "qwen2.5",
            [
                (CODER + "<|im_end|>", "So:", [("f", {"n": 5})]),
                ("<tool_call>f(5)</tool_call><|im_end|>", "<tool_call>f(5)</tool_call>", []),
                ("It is 5.<|im_end|>", "It is 5.", []),
            ],
        ),
    ],
)
def test_parsers_of_vllm_find_the_calls_and_leave_other_texts(
    name: str, family: str, answers: list[tuple[str, str, list[tuple[str, object]]]], tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(family, tmp_path)
    tools = tool_format(name, tokenizer, PYTHON)
    for text, content, calls in answers:
        for stream in (False, True):
            turn, sent = answer_of(tools, tokenizer, text, stream=stream)
            found = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in turn.calls]
            assert (turn.content.strip(), found) == (content.strip(), calls)
            assert sent == turn.content and turn.reason == ("tool_calls" if calls else "stop")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "python", "known"),
    [("none", PYTHON, "deepseek_v31"), ("llama3_json", PYTHON, "<|python_tag|>"), ("mistral", None, "hermes")],
    ids=["unknown", "a tokenizer without its token", "no vLLM"],
)
def test_a_parser_that_cannot_be_used_is_one_error_of_its_key(
    name: str, python: str | None, known: str, tmp_path: Path
) -> None:
    options = {"agent": f"{__name__}:agent", "tool_calls": name}
    config = MultiTurnConfig(episode="trainer.rollout.server.chat_server:AgentEpisode", options=options)
    with pytest.raises(ConfigError) as caught:
        make_episodes(config, tokenizer_of("qwen2.5", tmp_path), python)
    assert caught.value.key == "multi_turn.options.tool_calls" and known in str(caught.value)


async def agent(base_url: str, api_key: str, problem: object) -> None: ...
