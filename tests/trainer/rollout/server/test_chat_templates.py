"""Five turns with tools under the chat templates of eight families: the tokens are one encoding, or it is reported."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from trainer.data.hf_tokenizer import HuggingFaceTokenizer
from trainer.data.tokenizers import TokenizerSource
from trainer.rollout.server.chat_requests import ChatRequest
from trainer.rollout.server.sessions import ChatSession
from trainer.rollout.server.tool_calls import ToolFormat
from trainer.rollout.trajectory import Trajectory

FAMILIES = {
    "qwen2.5": (["<|im_end|>"], True),
    "qwen3": (["<|im_end|>"], False),
    "mistral-nemo": (["</s>"], False),
    "granite-3.3": (["<|end_of_text|>"], False),
    "seed-oss": (["<seed:eos>"], True),
    "deepseek-v3.1": (["<\uff5cend▁of▁sentence\uff5c>"], True),
    "kimi-k2": (["<|im_end|>"], True),
    "functionary": (["<|eot_id|>", "<|eom_id|>"], True),
}
"""Name: the stop tokens, and whether the template writes a turn as before when the conversation has gone on.

Qwen3 drops the empty thoughts of earlier turns, Mistral moves the tools to the last message of the user, and Granite
leaves out the calls.
"""
SPECIAL = re.compile("<[|\uff5c][^<>'\" ]*[|\uff5c]>|" r"\[/?[A-Z_]+\]|</?seed:[a-z_:]+>|</?s>")
ARGUMENTS = {"a": 2, "b": 3}
PARAMETERS = {"type": "object", "properties": {name: {"type": "integer"} for name in ARGUMENTS}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}]


class Scripted:
    """A rollout whose policy writes ``text``."""

    stepped, text = None, ""

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self.tokenizer = tokenizer

    def submit(self, trajectory: Trajectory, **options: Any) -> Future[Trajectory]:
        tokens, future = self.tokenizer.encode(self.text), Future[Trajectory]()
        trajectory.sampled(tokens, [0.0] * len(tokens))
        trajectory.ended = "stop"
        future.set_result(trajectory)
        return future


def tokenizer_of(family: str, folder: Path) -> HuggingFaceTokenizer:
    """Return a tokenizer of bytes with the template of a family and its special tokens."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    template = (Path(__file__).parent / "templates" / f"{family}.jinja").read_text()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({text: index for index, text in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    stops = FAMILIES[family][0]
    special = sorted({*SPECIAL.findall(template), *stops, "<s>"})
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token=stops[0])
    made.chat_template = template
    made.save_pretrained(folder)
    return HuggingFaceTokenizer(TokenizerSource(str(folder), lambda: ([], [])))


def one_text(tokenizer: HuggingFaceTokenizer, messages: Sequence[dict[str, Any]], *, to_go_on: bool = False) -> str:
    """Return what transformers makes of whole messages; some templates take arguments only as an object or a text."""
    for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):
        function = {"name": "add", "arguments": arguments}
        given = [
            {**message, "tool_calls": [{**call, "function": function} for call in message["tool_calls"]]}
            if "tool_calls" in message
            else message
            for message in ({**message, "content": message["content"] or ""} for message in messages)
        ]
        try:
            text: str = tokenizer.tokenizer.apply_chat_template(
                given, tools=TOOLS, tokenize=False, add_generation_prompt=to_go_on
            )
        except TypeError:
            continue
        return text
    raise AssertionError("the template takes no arguments of a call")


def policy_text(family: str, tokenizer: HuggingFaceTokenizer, messages: list[dict[str, Any]], reply: Any) -> str:
    """Return what a policy that was trained with the template writes as a message."""
    stops = FAMILIES[family][0]
    if family == "granite-3.3" and "tool_calls" in reply:
        return f"<|tool_call|>{json.dumps([{'name': 'add', 'arguments': ARGUMENTS}])}{stops[0]}"
    prompt, whole = one_text(tokenizer, messages, to_go_on=True), one_text(tokenizer, [*messages, reply])
    same = next((place for place, (ours, theirs) in enumerate(zip(prompt, whole)) if ours != theirs), len(prompt))  # noqa: B905
    assert len(prompt.rstrip()) <= same or family == "mistral-nemo"
    text = whole[same:]
    return text[: min(text.index(stop) + len(stop) for stop in stops if stop in text)]


@pytest.mark.parametrize("family", FAMILIES)
def test_five_turns_with_tools_are_one_encoding_or_the_difference_is_reported(family: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(family, tmp_path)
    call = [("add", json.dumps(ARGUMENTS))]
    calls = ToolFormat(lambda text, tools, tokens: ("", call) if "add" in text else (text, []), ())
    rollout = Scripted(tokenizer)
    session = ChatSession(rollout, tokenizer, calls, "a", 1)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "2 + 3?"}]

    async def play() -> None:
        for number, is_call in enumerate((True, False, True, False, False)):
            reply: dict[str, Any] = {"role": "assistant", "content": "It is 5."}
            if is_call:
                function = {"name": "add", "arguments": json.dumps(ARGUMENTS)}
                reply = {"role": "assistant", "content": None}
                reply["tool_calls"] = [{"id": "call00000", "type": "function", "function": function}]
            rollout.text = policy_text(family, tokenizer, messages, reply)
            session.begin()
            (turn,) = await session.submit(ChatRequest.of({"messages": messages, "tools": TOOLS}))
            async for _ in session.generate([turn], asyncio.Lock(), timeout_s=30):
                pass
            session.end()
            messages.append(turn.message)
            answer: dict[str, Any] = {"role": "user", "content": f"Again {number}?"}
            if is_call:
                answer = {"role": "tool", "tool_call_id": turn.calls[0]["id"], "content": "5"}
            messages.append(answer)

    asyncio.run(play())
    changes = session.prefix_changes
    (made,) = session.close()
    recorded, expected = [*made.prompt, *made.tokens], tokenizer.encode(one_text(tokenizer, messages[:-1]))
    assert made.turns == 5
    assert (recorded == expected[: len(recorded)]) == FAMILIES[family][1] == (not changes)
    if changes:
        ours, theirs = changes[0].excerpts()
        assert len(changes) == 1 and ours != theirs
