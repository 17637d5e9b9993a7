"""An agent with a calculator, as its authors would write it against any OpenAI-compatible endpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from examples.tools.arithmetic import CalculationError, calculate

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Return the exact value of an expression of numbers, parentheses, + - * /.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]
MAX_TURNS = 5


async def agent(base_url: str, api_key: str, problem: Mapping[str, Any]) -> None:
    """Answer one problem: send the messages, run the tools that the policy calls, and send what they return."""
    import openai

    messages = list(problem["prompt"])
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(MAX_TURNS):
            completion = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": run(call.function.arguments)})


def run(arguments: str) -> str:
    """Return the value of the expression in the arguments of a call, or what is wrong with them."""
    try:
        return str(calculate(str(json.loads(arguments)["expression"])))
    except (CalculationError, ValueError, KeyError, TypeError) as error:
        return f"error: {error}"
