"""A policy that calls a calculator: tasks of reasoning-gym, with the tool's output in the middle of its responses.

python -m mcontroller train examples/tools/config.yaml

The policy writes ``<7 - 4 + 9>``. At ``>`` its turn ends, the calculator appends ``12;``, and the policy goes on from
the same token ids: ``<7 - 4 + 9>12;12``. The calculator's tokens have a response mask of 0: they are neither scored nor
trained on. What follows the last ``;`` is the answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from examples.ppo.tokenizer import CharTokenizer
from examples.tools.arithmetic import CalculationError, calculate
from mcontroller.errors import ConfigError, DataError
from trainer import ENVIRONMENTS, TOKENIZERS, Demonstration, TokenizerSource, Trajectory
from trainer.data.tokenizers import TextTokenizer
from trainer.rewards.functions import reasoning_gym

START, END, AFTER = "<", ">", ";"
FAILED = "error"


@ENVIRONMENTS.register("calculator")
class Calculator:
    """Replies to every call with its value, or with ``error``.

    Args:
        tokenizer: of the policy; the marks of a call are one token each.

    Raises:
        ConfigError: a mark is several tokens.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.start, self.end = (self._one_token(mark) for mark in (START, END))
        self.stop_token_ids = (self.end,)

    def reply(self, conversations: Sequence[Trajectory]) -> list[list[int]]:
        """Return the output of the calculator for the last turn of each response, as tokens."""
        return [self.output(each.last_turn) for each in conversations]

    def output(self, turn: Sequence[int]) -> list[int]:
        """Return the output for a turn that ends with a call."""
        call = list(turn[:-1])
        if self.start in call:
            begin = len(call) - call[::-1].index(self.start)
            with suppress(CalculationError, DataError):  # DataError: the tokenizer has no token for a part of the value
                return self.tokenizer.encode(f"{calculate(self.tokenizer.decode(call[begin:]))}{AFTER}")
        return self.tokenizer.encode(FAILED + AFTER)

    def demonstrate(self, problem: Mapping[str, Any]) -> Demonstration:
        """Return a call with the expression of the problem, its output, and the answer."""
        expression = re.findall(r"[\d(][\d\s.()+*/-]*", problem["prompt"])[-1].strip()
        call = self.tokenizer.encode(f"{START}{expression}{END}")
        output, answer = self.output(call), self.tokenizer.encode(problem["answer"])
        return Demonstration([*call, *output, *answer], [1] * len(call) + [0] * len(output) + [1] * len(answer))

    def _one_token(self, mark: str) -> int:
        ids = self.tokenizer.encode(mark)
        if len(ids) != 1:
            raise ConfigError(f"the tokenizer encodes {mark!r} as {len(ids)} tokens; the calculator needs one")
        return ids[0]


async def episode(rollout: Any, problem: Mapping[str, Any]) -> Trajectory:
    """Return a response with calls, as the environment makes them, for ``multi_turn.episode``."""
    calculator = Calculator(rollout.tokenizer)
    made = await rollout.submit(problem["prompt_ids"], stop_token_ids=calculator.stop_token_ids)
    while made.ended == "turn":
        output = calculator.output(made.last_turn)
        if len(made.tokens) + len(output) >= rollout.response_length:
            break
        made.replied(output)
        made = await rollout.submit(made, stop_token_ids=calculator.stop_token_ids)
    return made


@TOKENIZERS.register("calculator")
def characters_with_calls(source: TokenizerSource) -> CharTokenizer:
    """Return the tokenizer of all prompts and answers, with the marks of a call and the calculator's output."""
    prompts, answers = source.texts()
    return CharTokenizer.of(list(prompts), [*answers, START, END, AFTER, FAILED, "-"])


def score(response: str, entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the score of the answer, ``accuracy``, and ``calls``, the number of calls in the response.

    Args:
        response: the generated text, with the calculator's output.
        entry: the problem, a column of the source ``reasoning_gym``.
    """
    return {**reasoning_gym(response.rpartition(AFTER)[2], entry), "calls": float(response.count(END))}
