"""Environments of the package verifiers, as their authors write them."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: a number.
        b: another one.
    """
    return a + b


async def right(completion: Any, answer: str) -> float:
    """Whether the last message ends with the answer."""
    return float(completion[-1]["content"].rstrip(".").endswith(answer))


async def tool_results(completion: Any) -> float:
    return float(sum(message["role"] == "tool" for message in completion))


def load_environment(fails: bool = False) -> vf.Environment:
    """Return sums to be added with a tool; if ``fails``, the rubric is not reached."""
    rows = [{"question": f"{number} + 3?", "answer": str(number + 3)} for number in range(2, 6)]
    rubric = vf.Rubric(funcs=[right], weights=[0.5])
    rubric.add_metric(tool_results)
    environment: vf.Environment = vf.ToolEnv(
        dataset=Dataset.from_list(rows), tools=[add], rubric=rubric, system_prompt="Be brief.", max_turns=5
    )
    return environment
