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
from trainer import TOKENIZERS, Demonstration, TokenizerSource, Trajectory
from trainer.data.tokenizers import TextTokenizer
from trainer.rewards.functions import reasoning_gym
from trainer.rollout.episode_loop import EpisodeRollout

START, END, AFTER = "<", ">", ";"
FAILED = "error"


class Calculator:
    """An episode in which every call is followed by its value, or by ``error``.

    Args:
        max_turns: [turns] most turns of the policy in one response.
    """

    def __init__(self, max_turns: int) -> None:
        self.max_turns = max_turns

    async def __call__(self, rollout: EpisodeRollout, problem: Mapping[str, Any]) -> Trajectory:
        """Return a response with calls and outputs. One without room for another turn is truncated."""
        end = one_token(rollout.tokenizer, END)
        made = await rollout.submit(problem["prompt_ids"], stop_token_ids=[end])
        while made.ended == "turn":
            made.ended, output = "length", output_of(made.last_turn, rollout.tokenizer)
            if made.turns < self.max_turns and len(made.tokens) + len(output) < rollout.response_length:
                made.replied(output)
                made = await rollout.submit(made, stop_token_ids=[end])
        return made

    def demonstrate(self, problem: Mapping[str, Any], tokenizer: TextTokenizer) -> Demonstration:
        """Return a call with the expression of the problem, its output, and the answer."""
        expression = re.findall(r"[\d(][\d\s.()+*/-]*", problem["prompt"])[-1].strip()
        call = tokenizer.encode(f"{START}{expression}{END}")
        output, answer = output_of(call, tokenizer), tokenizer.encode(problem["answer"])
        return Demonstration([*call, *output, *answer], [1] * len(call) + [0] * len(output) + [1] * len(answer))


def output_of(turn: Sequence[int], tokenizer: TextTokenizer) -> list[int]:
    """Return the output of the calculator for a turn that ends with a call, as tokens."""
    call, start = list(turn[:-1]), one_token(tokenizer, START)
    if start in call:
        begin = len(call) - call[::-1].index(start)
        with suppress(CalculationError, DataError):  # DataError: the tokenizer has no token for a part of the value
            return tokenizer.encode(f"{calculate(tokenizer.decode(call[begin:]))}{AFTER}")
    return tokenizer.encode(FAILED + AFTER)


def one_token(tokenizer: TextTokenizer, mark: str) -> int:
    """Return the token of a mark.

    Raises:
        ConfigError: it is several tokens.
    """
    ids = tokenizer.encode(mark)
    if len(ids) != 1:
        raise ConfigError(f"the tokenizer encodes {mark!r} as {len(ids)} tokens; the calculator needs one")
    return ids[0]


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
